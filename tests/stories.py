"""stories260k: a trained Llama of 260k parameters and 200 stories; not part of the project."""

import functools
import json
import os
from pathlib import Path

import pytest
import torch
import transformers

_BESIDE = Path(__file__).parents[2] / "shared/data"
FOLDER = Path(os.environ.get("DUOTONE_DATA", _BESIDE)) / "stories260k"
IDS = FOLDER / "tinystories_ids.json"

needs_stories = pytest.mark.skipif(
    not IDS.is_file(), reason="stories260k is absent; DUOTONE_DATA names the folder it is in"
)


@functools.cache
def stories_model(dtype=torch.float32):
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype).eval()


@functools.cache
def stories():
    return json.loads(IDS.read_text())
