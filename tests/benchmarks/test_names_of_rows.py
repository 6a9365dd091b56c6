"""Rows of results that have the name of a preset of ours ran its codes, where specs are stored."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import duotone
from benchmarks.measured import RESULTS, _spec_of, has_codes_of, spans_of
from duotone.quant.schemes import named

from paths import REPOSITORY

OURS = re.compile(r"duotone(-whole|-mixed|-stream)? ?@\d")


def specs(node: object, label: str = "") -> Iterator[tuple[str, dict]]:
    """(label, stored spec) of all rows in a result."""
    if isinstance(node, list):
        for row in node:
            yield from specs(row)
    elif isinstance(node, dict):
        label = node.get("row", label)
        if "visual" in node and "text" in node:
            yield label, node
        for key, value in node.items():
            yield from specs(value, label if key in ("configuration", "spec") else key)


def named_rows(result: dict) -> dict[str, bool]:
    """{label: whether it ran the preset's codes} of rows with the name of a preset of ours."""
    found, spans = {}, spans_of(result)
    for label, fields in specs(result):
        if OURS.fullmatch(label):
            ran = _spec_of(fields)
            preset = named(label.replace(" ", ""))
            found[label] = ran is not None and has_codes_of(ran, preset, spans)
    return found


def rows_of(path: Path) -> dict[str, bool]:
    """`named_rows` of a file."""
    return named_rows(json.loads(path.read_text(encoding="utf-8")))


FILES = {
    str(path.relative_to(REPOSITORY / RESULTS)): path
    for path in sorted((REPOSITORY / RESULTS).rglob("*.json"))
}
WITH_ROWS = [name for name, path in FILES.items() if rows_of(path)]


@pytest.mark.parametrize("name", WITH_ROWS)
def test_rows_have_the_names_of_their_specs(name: str) -> None:
    rows = rows_of(FILES[name])
    assert all(rows.values()), [label for label, same in rows.items() if not same]


def test_a_row_of_another_spec_is_found() -> None:
    whole = duotone.scheme("duotone-whole", bits=1).to_dict()
    rows = {"duotone @1": whole, "duotone-whole @1": whole, "duotone @1, V without gain": whole}
    in_table = {"schemes": {k: {"configuration": {"spec": x}} for k, x in rows.items()}}
    in_list = {"rows": [{"row": k, "spec": x} for k, x in rows.items()]}
    expected = {"duotone @1": False, "duotone-whole @1": True}
    assert named_rows(in_table) == named_rows(in_list) == named_rows({"specs": rows}) == expected
