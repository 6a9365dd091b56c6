"""Rows of the quality tables: every scheme, and one part at a time."""

import pytest

import duotone
from benchmarks.quality import rows as rows_of
from duotone import KVSpec, scheme
from duotone.quant.schemes import SCHEMES


def test_rows_are_the_ablations_the_issue_asks_for():
    rows = rows_of.table_specs(1, (1, 2))
    paper = rows["calibquant-paper @1"]
    assert paper.tau == (1, 2)
    assert rows["calibquant-paper, no tau @1"] == paper.replace(tau=None)
    global_v = rows["calibquant-paper, global V @1"]
    assert (global_v.visual.key, global_v.visual.value.along) == (paper.visual.key, "span")
    assert (
        rows["lloyd, gain 1.3 / 1.4 @1"].visual.value.gain
        > rows["lloyd @1"].visual.value.gain
        == 1.0
    )
    assert rows["calibquant @1"] == duotone.scheme("calibquant", bits=1)


def test_the_presets_ablations_take_one_part_each():
    preset = duotone.scheme("duotone-whole")
    one_width, alike, no_gain, sequence = rows_of.ablations(preset).values()
    assert one_width.visual.key.classes is one_width.visual.value.classes is None
    assert one_width.visual.key.group == preset.visual.key.group
    assert alike.visual.key.energy == alike.visual.value.energy == 0
    assert no_gain == preset.replace(
        visual=preset.visual.replace(value=preset.visual.value.replace(gain=1.0))
    )
    assert sequence == preset.replace(ranges="sequence")


def test_every_registered_scheme_has_rows():
    rows = rows_of.picture_rows(32, 8)
    names = {label.split(" @")[0] for label in rows}
    assert set(SCHEMES) <= names
    assert rows["calibquant @1"] == scheme("calibquant", bits=1)
    assert rows["kivi @2"] == scheme("kivi", bits=2).replace(recent=32)
    assert rows["kivi @2, window as published"].recent == 128


def test_a_text_model_gets_the_schemes_with_a_policy_for_text():
    rows = rows_of.text_rows(32, 5)
    assert {"kivi @2", "innerq @1", "asymkv", "xquant, pairs of V"} <= set(rows)
    assert all(isinstance(spec.text, KVSpec) for spec in rows.values())


@pytest.mark.parametrize("bits", [1, 2])
def test_ingredients_end_at_the_preset(bits):
    *_, unequal, last = rows_of.visual_ingredients(bits).values()
    preset = scheme("duotone-whole", bits=bits)
    assert last == preset.replace(ranges="sequence")
    assert unequal.visual.key == preset.visual.key.replace(group=None)
