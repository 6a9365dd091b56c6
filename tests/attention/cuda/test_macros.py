"""Macros that a source leaves to its compilation are named in a comment of it, or of a header."""

import re

import pytest

from duotone.tools.nvrtc import Sources

from paths import REPOSITORY

ROOMS = ("attention/cuda", "weights/kernels/cuda")
FILES = [
    (room, path.relative_to(REPOSITORY / "src/duotone" / room).as_posix())
    for room in ROOMS
    for path in sorted((REPOSITORY / "src/duotone" / room).rglob("*.cu"))
]
NAME = re.compile(r"\b[A-Z][A-Z0-9_]*\b")
# Macros of the source itself, constants and template parameters, enumerators.
DEFINED = re.compile(
    r"#define (\w+(?:\([^)]*\))?)|\b(?:int|bool|u32|class|float) ([A-Z]\w*)\b|\benum \{(.*?)\}"
    r"|,\s*([A-Z][A-Z0-9_]*) = "
)


def unnamed(text: str) -> set[str]:
    """Names in capitals that a source neither defines nor mentions in a comment."""
    code = re.sub(r'"(\\.|[^"\\\n])*"', "", re.sub(r"//.*", "", text))
    defined = {name for match in DEFINED.findall(code) for name in NAME.findall(" ".join(match))}
    return (
        set(NAME.findall(code)) - defined - set(NAME.findall("\n".join(re.findall("//.*", text))))
    )


@pytest.mark.parametrize(("room", "name"), FILES, ids=str)
def test_every_macro_is_named_in_a_comment(room: str, name: str) -> None:
    assert unnamed(Sources(f"duotone.{room.replace('/', '.')}").text(name)) == set()


def test_a_macro_without_a_word_is_noticed() -> None:
    text = "// KB: bits.\n#define D (CHANNELS + KB)\ntemplate <int N>\nint f() { return N * D; }\n"
    assert unnamed(text) == {"CHANNELS"}
