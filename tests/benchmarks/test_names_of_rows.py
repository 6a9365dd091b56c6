"""Rows of results that have the name of a preset of ours ran its codes, where specs are stored."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import duotone
from benchmarks.measured import OF_TALKS, OF_TEXT, RESULTS, _spec_of, has_codes_of, spans_of
from duotone.quant.schemes import named

from paths import REPOSITORY

# Models whose spans have tiles (`spans_of`), where they are not of the zoo.
TILED = re.compile(r"internvl|duotone-tiny")
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


def models(node: object) -> Iterator[str]:
    """Names of the models in a result."""
    for child in node if isinstance(node, list) else []:
        yield from models(child)
    if isinstance(node, dict):
        model = node.get("model", {})
        yield from [model] if isinstance(model, str) else models(list(node.values()))
        if isinstance(model, dict) and "name" in model:
            yield model["name"]


@pytest.mark.parametrize("name", WITH_ROWS)
def test_models_without_shapes_of_their_own_have_tiles(name: str) -> None:
    """Else `spans_of` would say nothing of their pictures."""
    result = json.loads(FILES[name].read_text(encoding="utf-8"))
    found = set(models(result))
    assert found
    others = result.get("schema") in (OF_TALKS, OF_TEXT)
    assert others or all(map(TILED.match, found)), found


def test_a_row_of_another_spec_is_found() -> None:
    whole = duotone.scheme("duotone-whole", bits=1).to_dict()
    rows = {"duotone @1": whole, "duotone-whole @1": whole, "duotone @1, V without gain": whole}
    in_table = {"schemes": {k: {"configuration": {"spec": x}} for k, x in rows.items()}}
    in_list = {"rows": [{"row": k, "spec": x} for k, x in rows.items()]}
    expected = {"duotone @1": False, "duotone-whole @1": True}
    assert named_rows(in_table) == named_rows(in_list) == named_rows({"specs": rows}) == expected
