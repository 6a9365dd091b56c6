"""A key's way through hf, counted by a trace: which files a prompt's K and V of a layer enter."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from small_specs import MIXED, VISUAL

import duotone
from duotone import CacheSpec, Eviction, QuantizedCache

from families import inputs, tiny_model

ROOM = Path(duotone.hf.__file__).parent
MOST = 6


def file_of(frame: FrameType | None) -> str | None:
    """A frame's file below hf, or None for one elsewhere."""
    path = None if frame is None else Path(frame.f_code.co_filename)
    return path.relative_to(ROOM).as_posix() if path and path.is_relative_to(ROOM) else None


def entries(run: Callable[[], Any]) -> list[list[str]]:
    """Files of hf that a call enters, from another file or from outside; a list per layer.

    A layer begins with its `update` and ends with the next one's, or with the step's end.
    """
    found: list[list[str]] = [[]]  # first of what comes before all layers

    def note(frame: FrameType, event: str, _: Any) -> None:
        here, caller = file_of(frame), frame.f_back
        if event != "call" or here is None:
            return
        while caller is not None and file_of(caller) is None:
            caller = caller.f_back
        if file_of(caller) != here:
            if frame.f_code.co_name in ("update", "_after_forward"):
                found.append([])
            found[-1].append(here)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found[1:-1]


def way(spec: CacheSpec) -> list[list[str]]:
    model, given = tiny_model("internvl"), inputs("internvl", [[3, "image", 9]])
    cache = QuantizedCache(model, spec)
    with torch.no_grad():
        return entries(lambda: model(**given, past_key_values=cache))


@pytest.mark.parametrize("spec", [VISUAL, MIXED], ids=["visual", "mixed"])
def test_a_prompt_enters_few_files_and_each_once(spec: CacheSpec) -> None:
    layers = way(spec)
    assert len(layers) == tiny_model("internvl").config.get_text_config().num_hidden_layers
    for files in layers:
        assert {"cache/layer.py", "cache/timeline.py", "cache/attention.py"} <= set(files)
        assert len(files) == len(set(files)) <= MOST


def test_a_file_that_is_entered_again_is_seen() -> None:
    """An evicted prompt comes back to the timeline with its scores."""
    files = way(VISUAL.replace(evict=Eviction(0.5)))[0]
    assert files.count("cache/timeline.py") > 1
