"""Result files as plain data: a .json holds one result, a .jsonl one per line."""

from pathlib import Path
from typing import Any

from duotone.tools import json_text

SUFFIXES = (".json", ".jsonl")
UNFINISHED = ".partial"  # end of the name of a folder of an evaluation that has not ended


def result_files(folder: Path) -> list[Path]:
    """Files below `folder` that may hold results, in the order of their paths."""
    found = sorted(path for path in folder.rglob("*.json*") if path.suffix in SUFFIXES)
    return [path for path in found if not _is_unfinished(path.relative_to(folder))]


def _is_unfinished(path: Path) -> bool:
    return any(part.endswith(UNFINISHED) for part in path.parts)


def read_file(path: Path) -> list[Any]:
    """Values of a file: one of a .json, one per line of a .jsonl.

    Errors: ValueError with the path, and the line of a .jsonl, where a value is no JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as error:
        raise ValueError(f"a result file is UTF-8; got {str(path)!r}: {error}") from error
    if path.suffix != ".jsonl":
        return [_value(text, repr(str(path)))]
    # Not splitlines: a text in JSON may hold other separators of lines.
    lines = text.removesuffix("\n").split("\n")
    return [_value(line, f"line {i} of {str(path)!r}") for i, line in enumerate(lines, start=1)]


def _value(text: str, where: str) -> Any:
    try:
        return json_text.loads(text)
    except ValueError as error:
        raise ValueError(f"a result file is JSON; got {where}: {error}") from error
