"""Rows of a data set: from a local JSONL or JSON file, or from the hub through `datasets`."""

import hashlib
import importlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duotone import json_text

Row = dict[str, Any]


def read_text(path: Path) -> str:
    """The text of a data file that must exist."""
    if not path.is_file():
        raise ValueError(
            f"task data must be an existing file, got {str(path)!r} (looked in {Path.cwd()}); "
            "check the path given to --data"
        )
    return path.read_text(encoding="utf-8")


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


def parse_lines(text: str, name: str) -> dict[str, Any]:
    """{where: value} of a JSONL file, `where` naming file and line, blank lines left out."""
    numbered = enumerate(text.splitlines(), start=1)
    lines = {f"{name} line {number}": line for number, line in numbered if line.strip()}
    if not lines:
        raise ValueError(f"task data must have at least one row, got none in {name}; fill it")
    return {where: _parsed(line, where) for where, line in lines.items()}


def file_rows(path: str | Path) -> tuple[dict[str, Any], str]:
    """({where: row}, fingerprint) of a JSONL file, or of a JSON file with a list of rows."""
    path = Path(path)
    text = read_text(path)
    if path.suffix != ".json":
        return parse_lines(text, path.name), fingerprint(text)
    rows = _parsed(text, path.name)
    if not isinstance(rows, list) or not rows:
        raise ValueError(
            f"a .json file must hold a list of rows, got {str(rows)[:80]} in {path.name}; "
            "one row per line is a .jsonl file"
        )
    return {f"{path.name} row {i}": row for i, row in enumerate(rows, start=1)}, fingerprint(text)


@dataclass(frozen=True)
class HubTable:
    """Location of a data set on the hub."""

    repository: str
    config: str
    split: str

    def rows(self) -> tuple[dict[str, Any], str]:
        """({where: row}, fingerprint), downloaded by `datasets`."""
        try:
            datasets = importlib.import_module("datasets")
        except ImportError as error:
            raise ImportError(
                f"{self.repository} is read from the hub by the package datasets, which is not "
                "installed; pip install 'duotone[hub]', or give a local file with --data"
            ) from error
        table = datasets.load_dataset(self.repository, self.config, split=self.split)
        where = f"{self.repository} {self.config} row"
        rows = {f"{where} {i}": dict(row) for i, row in enumerate(table, start=1)}
        return rows, fingerprint(json.dumps(list(rows.values()), sort_keys=True, default=str))


def _fits(value: Any, kind: type) -> bool:
    if kind is not list:
        return isinstance(value, kind) and bool(value.strip())
    return isinstance(value, list) and bool(value) and all(isinstance(v, str) for v in value)


def check_row(row: Any, fields: Mapping[str, type], where: str) -> Row:
    """The row, if it has all `fields`: str (a text, not blank) or list (of texts, not empty)."""
    words = {str: "text", list: "[texts]"}
    expected = "{" + ", ".join(f'"{name}": {words[kind]}' for name, kind in fields.items()) + "}"
    if not isinstance(row, dict):
        raise ValueError(f"each row must be {expected}, got {str(row)[:80]} in {where}; fix it")
    wrong = [name for name, kind in fields.items() if not _fits(row.get(name), kind)]
    if wrong:
        got = f"{wrong[0]} = {str(row.get(wrong[0]))[:80]!r}" if wrong[0] in row else sorted(row)
        raise ValueError(
            f"each row must be {expected}, got {got} in {where}; is this the file of another task?"
        )
    return row
