"""Tensor parallel: a rank's pages hold the kv heads of that rank."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

from engine import answers, engine, install, tiny_llama  # noqa: E402

install()  # before vLLM looks for platforms

from exact import prompts_of  # noqa: E402

from duotone.serve import layers  # noqa: E402

NEW = 24


WIDTHS = {"additional_config": {"duotone": {"widths": {"0": 4}}}}


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "options"),
    [(2, "duotone_4bit", {}), (1, "duotone_4bit", {}), (2, "duotone_2bit", WIDTHS)],
    ids=["heads", "copies", "widths"],
)
def test_two_ranks_say_what_one_does(
    kv_heads: int,
    dtype: str,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one kv head, both ranks have a copy of it."""
    model, prompts = tiny_llama(tmp_path / "llama", kv_heads=kv_heads), prompts_of(6)
    held: list[str] = []
    monkeypatch.setattr(layers.logger, "info_once", lambda form, text: held.append(text))
    options = {"block_size": None, **options}
    with engine(model, dtype, **options) as llm:
        one = answers(llm, prompts, NEW)
    command = [sys.executable, Path(__file__).parent / "two_ranks.py", model, dtype, str(NEW)]
    done = subprocess.run(
        [*command, json.dumps(options)], input=json.dumps(prompts), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"ranks": 2, "answers": one}
    # Said once: pages of a rank hold its heads alone, and so does the 16 bit next to them.
    lines = re.findall(r"duotone: blocks of .*", done.stderr)
    assert lines == [*set(held)]
