"""Commands that pages show exist, with the options that are given."""

import re
import shlex
from collections.abc import Iterator

import pytest
import typer

from duotone.cli import app

from paths import REPOSITORY

PAGES = [*sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "README.md"]
COMMAND = typer.main.get_command(app)


def shown(page: str) -> Iterator[list[str]]:
    """Words of each line of a code block, fenced or indented, that begins with `duotone`."""
    joined = re.sub(r" *\\\n *", " ", page)
    for line in re.findall(r"^(?:    )?duotone .*$", joined, re.M):
        yield shlex.split(line, comments=True)[1:]


def mistakes(words: list[str]) -> Iterator[str]:
    """Words of a command that it does not take."""
    command = COMMAND
    while hasattr(command, "commands") and words:
        if words[0] not in command.commands:
            yield words[0]
            return
        command, words = command.commands[words[0]], words[1:]
    taken = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    yield from (w for w in words if re.match(r"--?[a-z]", w) and w.partition("=")[0] not in taken)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_takes_its_options(page) -> None:
    found = {" ".join(w): list(mistakes(w)) for w in shown(page.read_text(encoding="utf-8"))}
    assert not {line: wrong for line, wrong in found.items() if wrong}


def test_commands_are_found() -> None:
    found = [words for page in PAGES for words in shown(page.read_text(encoding="utf-8"))]
    assert len(found) > 30
    assert len({words[0] for words in found}) > 8


def test_a_command_that_is_gone_is_noticed() -> None:
    page = "words\n\n    duotone plan --modle x  # --no\n```\nduotone bench kernal \\\n  -q\n```\n"
    first, second = shown(page)
    assert list(mistakes(first)) == ["--modle"]
    assert list(mistakes(second)) == ["kernal"]
    assert not list(mistakes(["schemes", "--json"]))
