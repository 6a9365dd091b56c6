import json
from argparse import Namespace

import pytest
import scheme_rows
import scheme_table as script

from duotone import KVSpec, scheme
from duotone.loading import Loaded
from duotone.quant.schemes import SCHEMES
from duotone.report import tables as report
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model


def test_every_registered_scheme_has_rows():
    rows = scheme_rows.picture_rows(32, 8)
    names = {label.split(" @")[0] for label in rows}
    assert set(SCHEMES) <= names
    assert rows["calibquant @1"] == scheme("calibquant", bits=1)
    assert rows["kivi @2"] == scheme("kivi", bits=2).replace(recent=32)
    assert rows["kivi @2, window as published"].recent == 128


def test_a_text_model_gets_the_schemes_with_a_policy_for_text():
    rows = scheme_rows.text_rows(32, 5)
    assert {"kivi @2", "innerq @1", "asymkv", "xquant, pairs of V"} <= set(rows)
    assert all(isinstance(spec.text, KVSpec) for label, spec in rows.items() if label != "fp8")
    assert rows["fp8"].dense_dtype != "model"


@pytest.mark.parametrize("bits", [1, 2])
def test_ingredients_end_at_the_preset(bits):
    *_, unequal, last = scheme_rows.visual_ingredients(bits).values()
    preset = scheme("duotone", bits=bits)
    assert last == preset.replace(ranges="sequence")
    assert unequal.visual.key == preset.visual.key.replace(group=None)


def test_the_table_of_a_task_is_rendered(tmp_path):
    loaded = Loaded("tiny", tiny_model(), TinyProcessor())
    rows = {label: scheme(label) for label in ("duotone", "kivi", "minmax")}
    asked = Namespace(n=3, batch_size=3, workers=0, impl="auto", window=32, minutes=None)
    evaluation, data = script.picture_table(loaded, TINY_TASK, rows, asked)
    assert list(data["schemes"]) == ["16-bit", *rows]
    assert data["schemes"]["minmax"]["metrics"]["kl"]["value"] > 0
    assert data["differences"]["kivi - 16-bit"]["anls"]
    (tmp_path / "tiny.json").write_text(json.dumps(data))
    table = report.tables(tmp_path)["schemes"]
    assert "| duotone | 1.00 |" in table
    assert len(evaluation.examples) == 3
