"""Rows of a local JSONL or JSON file."""

import hashlib
from pathlib import Path
from typing import Any

from duotone.tools import json_text


def read_text(path: Path) -> str:
    """The text of a data file that must exist."""
    if not path.is_file():
        raise ValueError(
            f"task data must be an existing file, got {str(path)!r} (looked in {Path.cwd()}); "
            "check the path that was given"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"task data must be UTF-8, got {str(path)!r}: {error}") from error


def fingerprint(text: str) -> str:
    """Ten characters that change with the data."""
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _parsed(text: str, where: str) -> Any:
    try:
        return json_text.loads(text)
    except ValueError as error:
        raise ValueError(
            f"task data must be JSON, got none in {where}: {error}; is the file cut off?"
        ) from error


def lines_of(text: str, name: str) -> dict[str, str]:
    """{where: line} of a JSONL file, `where` naming file and line, blank lines left out."""
    # Not splitlines: JSON strings may hold characters that Unicode counts as a line's end.
    numbered = enumerate(text.split("\n"), start=1)
    lines = {f"{name} line {number}": line for number, line in numbered if line.strip()}
    if not lines:
        raise ValueError(f"task data must have at least one row, got none in {name}; fill it")
    return lines


def file_rows(path: str | Path) -> tuple[dict[str, Any], str]:
    """({where: row}, fingerprint) of a JSONL file, or of a JSON file with a list of rows."""
    path = Path(path)
    text = read_text(path)
    if path.suffix != ".json":
        lines = lines_of(text, path.name).items()
        return {where: _parsed(line, where) for where, line in lines}, fingerprint(text)
    rows = _parsed(text, path.name)
    if not isinstance(rows, list) or not rows:
        raise ValueError(
            f"a .json file must hold a list of rows, got {str(rows)[:80]} in {path.name}; "
            "one row per line is a .jsonl file"
        )
    return {f"{path.name} row {i}": row for i, row in enumerate(rows, start=1)}, fingerprint(text)


def text_of(row: Any, where: str) -> str:
    """The text of a row {"text": ...}, which is not blank."""
    rule = 'each row must be {"text": text}'
    if not isinstance(row, dict):
        raise ValueError(f"{rule}, got {str(row)[:80]} in {where}; fix it")
    text = row.get("text")
    if not isinstance(text, str) or not text.strip():
        got = f"text = {str(text)[:80]!r}" if "text" in row else sorted(row)
        raise ValueError(f"{rule}, got {got} in {where}; is this the file of a task?")
    return text
