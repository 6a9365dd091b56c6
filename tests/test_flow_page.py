"""Pages for first readers name files of src/duotone, and what to look for in them."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from paths import REPOSITORY

SOURCES = REPOSITORY / "src" / "duotone"
PAGE = REPOSITORY / "docs" / "how-a-token-flows.md"
KERNELS, CUDA = REPOSITORY / "docs" / "cuda-kernels.md", SOURCES / "attention" / "cuda"
FILE = re.compile(r"^[\w/]+\.(?:py|cuh?)$")
NAME = re.compile(r"^\w+$")


def absent(text: str, sources: Path = SOURCES) -> Iterator[str]:
    """Files of numbered items that are not there, and names that none of an item's files has."""
    for line in re.findall(r"^\d+\. .*(?:\n   .*)*", text, re.M):
        quoted = re.findall(r"`([^`]+)`", line)
        files = [sources / name for name in quoted if FILE.match(name) and "/" in name]
        files += [sources / name for name in quoted[:1] if FILE.match(name) and "/" not in name]
        yield from (str(file.relative_to(sources)) for file in files if not file.is_file())
        found = "\n".join(file.read_text() for file in files if file.is_file())
        for name in filter(NAME.match, quoted):
            if not re.search(rf"\b{name}\b", found):
                yield f"{name}: {line}"


def included(name: str) -> Iterator[str]:
    """Headers that a CUDA source includes, and headers of these."""
    for header in re.findall(r'^#include "(.+)"$', (CUDA / name).read_text(), re.M):
        yield header
        yield from included(header)


@pytest.mark.parametrize(("page", "sources"), [(PAGE, SOURCES), (KERNELS, CUDA)], ids=str)
def test_every_file_and_name_is_there(page: Path, sources: Path) -> None:
    assert not list(absent(page.read_text(), sources))


def test_a_first_kernel_is_read_with_all_that_it_includes() -> None:
    listed = re.findall(r"^\d+\. `([\w/]+\.cuh)`", KERNELS.read_text(), re.M)
    assert sorted(listed) == sorted(included("spans/decode.cu"))
    assert [name.partition("/")[0] for name in listed] == ["shared"] * 7 + ["spans"] * 6


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
        ("1. `hf/session.py`: see\n   `hf/gone.py`", "hf/gone.py"),
        ("1. `hf/session.py`: `Unheard` of it", "Unheard: 1. `hf/session.py`: `Unheard` of it"),
    ],
)
def test_what_is_not_there_is_named(line: str, said: str) -> None:
    assert list(absent(f"# A page\n{line}\n")) == [said]
