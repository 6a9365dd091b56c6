"""The package's rows of recommended schemes are those of the results."""

import json

import pytest

import duotone
from benchmarks.measured import (
    FILE,
    RESULTS,
    has_codes_of,
    losses,
    measured,
    spans_of,
    speeds,
    text_of,
)
from duotone.report.tables import read_results

from paths import REPOSITORY

SPEC = duotone.scheme("kivi", bits=2)
RECALL = {"value": 0.5, "low": 0.25, "high": 0.75}
PLACE = {"device": "GPU", "commit": "abcdef0123456", "created": "2026-01-02T03:04:05"}


def test_the_file_is_made_of_todays_results_and_presets() -> None:
    """Else: python -m benchmarks.measured."""
    made = text_of(measured(read_results(REPOSITORY / RESULTS)))
    assert (REPOSITORY / FILE).read_text(encoding="utf-8") == made


def task(window: int, samples: int, **fields: object) -> dict:
    spec = {**SPEC.replace(recent=window).to_dict(), **fields}
    model = {"name": "tiny", "parameters": 3}
    rows = {
        name: {"configuration": {"spec": x, "model": model}, "metrics": {"anls": RECALL, "kl": {}}}
        for name, x in {"16-bit": None, "kivi": spec}.items()
    }
    return {
        "schema": "duotone.schemes/1",
        "task": "documents",
        "headline": "anls",
        **PLACE,
        "later_question": True,
        "samples": samples,
        "schemes": rows,
        "differences": {"kivi - 16-bit": {"anls": RECALL}},
    }


def test_a_loss_is_of_the_most_samples_then_of_the_longest_window() -> None:
    (found,) = losses([task(128, 9), task(32, 20), task(64, 20), task(16, 20)], SPEC)
    assert (found["samples"], found["window"], found["commit"]) == (20, 64, "abcdef0123")


def talks(model: str, window: int) -> dict:
    spec = SPEC.replace(recent=window).to_dict()
    rows = [{"row": "16 bit", "accuracy": 0.5}, {"row": "x", "accuracy": 0.25, "kl": 0.125}]
    rows = [rows[0], {**rows[1], "spec": spec}, {"row": "failed", "failed": "why"}]
    name = "duotone.conversation/1"
    return {"schema": name, "model": model, "conversations": 9, "rows": rows, **PLACE}


def test_conversations_count_for_each_model() -> None:
    found = losses([talks("deep", 128), talks("llava", 64), talks("gemma3", 129)], SPEC)
    assert [one["model"] for one in found] == ["a small deep", "a small llava"]
    assert {(x["value"], x["reference"], x["kl"]["value"]) for x in found} == {(0.25, 0.5, 0.125)}


def test_rows_of_other_codes_longer_windows_and_former_fields_do_not_count() -> None:
    assert losses([task(129, 9)], SPEC) == []
    assert losses([task(128, 9, ranges="run")], SPEC) == []
    assert losses([task(128, 9, dense_dtype="float8")], SPEC) == []
    assert losses([task(128, 9, unheard_of=1)], SPEC) == []
    assert len(losses([task(128, 9, dense_dtype="model")], SPEC)) == 1
    assert has_codes_of(SPEC, SPEC.replace(sink=4), [])
    assert not has_codes_of(SPEC.replace(sink=4), SPEC, [])


def test_shares_of_lengths_that_no_picture_has_do_not_count() -> None:
    spec = duotone.scheme("duotone", bits=2)
    ran = spec.replace(short_foreground=spec.short_steps[:1])
    assert has_codes_of(ran, spec, [49, 112, 256])
    assert not has_codes_of(ran, spec, [49, 64, 256])
    assert not has_codes_of(ran.replace(foreground=0.5), spec, [49, 256])
    found = {name: list(spans_of(talks(name, 128))) for name in ("llava", "qwen2-vl", "deep")}
    assert found == {"llava": [49], "qwen2-vl": [64, 72], "deep": [256]}
    assert min(spans_of(task(128, 9))) == 256


@pytest.mark.parametrize(
    ("row", "count"),
    [
        ({}, 1),
        ({"row": "kivi@2, no graphs"}, 0),
        ({"weights": "W4A8"}, 0),
        ({"spec": SPEC.replace(recent=64).to_dict()}, 0),
    ],
)
def test_a_speed_is_of_the_very_spec_on_16_bit_weights(row: dict, count: int) -> None:
    plain = {"row": "plain", "weights": "16 bit", "ms_per_token": 20.0}
    ours = {"row": "kivi@2", "weights": "16 bit", "ms_per_token": 2.0, "spec": SPEC.to_dict()}
    result = {
        "schema": "duotone.generate/1",
        "weights": "16 bit",
        "model": "8b",
        **PLACE,
        "q_heads": 8,
        "kv_heads": 4,
        "prompt_tokens": 9,
        "rows": [plain, {**ours, **row}],
        "load": {"batch": 1, "tokens": 9, "padded": False},
    }
    found = speeds(json.loads(json.dumps([result])), SPEC)
    assert len(found) == count
    assert all((x["ms_per_token"], x["plain_ms"]) == (2.0, 20.0) for x in found)
