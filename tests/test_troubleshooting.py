"""Messages that docs/troubleshooting.md quotes are messages of the source."""

import ast
import re
from collections.abc import Iterator

from paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
# Shorter pieces between two names would be found anywhere.
SHORTEST = 8


def texts() -> list[str]:
    """All strings of the source, parts of f-strings by themselves."""
    files = (REPOSITORY / "src" / "duotone").rglob("*.py")
    trees = (ast.parse(file.read_text(encoding="utf-8")) for file in files)
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return [node.value for node in nodes if isinstance(node.value, str)]


def quoted(page: str) -> list[str]:
    """Messages that a page quotes."""
    return re.findall(r"^> `(.+)`(?:<br>)?$", page, re.M)


def unknown(message: str, known: list[str]) -> Iterator[str]:
    """Pieces of a message between its names that no string has."""
    # How a path is slow and why are two strings.
    pieces = (piece.strip().removesuffix(", because") for piece in message.split("…"))
    yield from (p for p in pieces if len(p) >= SHORTEST and not any(p in text for text in known))


def test_every_message_is_one_of_the_source() -> None:
    messages, known = quoted(PAGE), texts()
    assert len(messages) > 25
    assert len(messages) == PAGE.count("\n> ")
    assert not [piece for message in messages for piece in unknown(message, known)]


def test_a_message_that_is_gone_is_noticed() -> None:
    page = "> `visual_mask must be …`<br>\n> `… was never … a message of ours`\nwords `code`\n"
    assert quoted(page) == ["visual_mask must be …", "… was never … a message of ours"]
    known = ["visual_mask must be a tensor"]
    assert [p for m in quoted(page) for p in unknown(m, known)] == [
        "was never",
        "a message of ours",
    ]
