"""Tensor parallel: a rank's pages hold the kv heads of that rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]

from engine import answers, engine, install, tiny_llama  # noqa: E402

install()  # before vLLM looks for platforms

from exact import prompts_of  # noqa: E402

NEW = 40


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_two_ranks_say_what_one_does(kv_heads: int, tmp_path: Path) -> None:
    """With one kv head, both ranks have a copy of it."""
    model, prompts = tiny_llama(tmp_path / "llama", kv_heads=kv_heads), prompts_of(6)
    with engine(model, "duotone_4bit") as llm:
        one = answers(llm, prompts, NEW)
    done = subprocess.run(
        [sys.executable, Path(__file__).parent / "two_ranks.py", model, "duotone_4bit", str(NEW)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"ranks": 2, "answers": one}
