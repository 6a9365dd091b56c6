"""docs/how-a-token-flows.md names files of src/duotone, and what to look for in them."""

import re
from collections.abc import Iterator

import pytest

from paths import REPOSITORY

SOURCES = REPOSITORY / "src" / "duotone"
PAGE = REPOSITORY / "docs" / "how-a-token-flows.md"
FILE = re.compile(r"^[\w/]+\.(?:py|cuh?)$")
NAME = re.compile(r"^\w+$")


def absent(text: str) -> Iterator[str]:
    """Files of numbered lines that are not there, and names that none of a line's files has."""
    for line in re.findall(r"^\d+\. .*$", text, re.M):
        quoted = re.findall(r"`([^`]+)`", line)
        files = [SOURCES / name for name in quoted if FILE.match(name) and "/" in name]
        files += [SOURCES / name for name in quoted[:1] if FILE.match(name) and "/" not in name]
        yield from (str(file.relative_to(SOURCES)) for file in files if not file.is_file())
        found = "\n".join(file.read_text() for file in files if file.is_file())
        for name in filter(NAME.match, quoted):
            if not re.search(rf"\b{name}\b", found):
                yield f"{name}: {line}"


def test_every_file_and_name_is_there() -> None:
    assert not list(absent(PAGE.read_text()))


def test_the_page_is_short_and_numbered_in_order() -> None:
    text = PAGE.read_text()
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", text, re.M)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(text.splitlines()) <= 80


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("1. `hf/gone.py`: see", "hf/gone.py"),
        ("1. `gone.py`: see", "gone.py"),
        ("1. `hf/session.py`: `Unheard` of it", "Unheard: 1. `hf/session.py`: `Unheard` of it"),
    ],
)
def test_what_is_not_there_is_named(line: str, said: str) -> None:
    assert list(absent(f"# A page\n{line}\n")) == [said]
