"""README's Python runs as it stands and says what README says it says; README stays short."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 900


def test_the_blocks_run_and_print_the_answer_that_the_text_quotes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S):
        exec(compile(block, "README.md", "exec"), names)
    quoted = re.search(r'It prints "(.*?), \.\.\."', README)[1]
    printed = capsys.readouterr().out
    assert printed.startswith(quoted)
    assert "true bits per number" in printed


def test_it_is_short() -> None:
    assert len(README.split()) <= MOST_WORDS
