"""Tables of transform coding hold every number of their files."""

import pytest

from benchmarks.transform import tables

HEADER = {"created": "2026-01-02T03:04:05+00:00", "commit": "0123456789abcdef", "device": "H200"}
HEADER |= {"versions": {"torch": "2.11"}}
COUNTS = {"calibration_samples_per_task": 64, "heldout_samples_per_task": 96}


def interval(value):
    return {"value": value, "low": value * 0.5, "high": value * 1.5}


def row(kl, tasks=("captions", "documents")):
    return {"bits": 1.149, "kl": kl, "tasks": {name: {"kl": interval(kl)} for name in tasks}}


def test_widths_show_scores_and_divergence():
    memory = {"nominal_bits": 0.93, "bits_per_element": 3.3, "visual_bits_per_element": 1.149}
    schemes = {
        "16-bit": {"metrics": {"anls": interval(0.9)}, "memory": memory},
        "klt": {"metrics": {"anls": interval(0.8), "kl": interval(0.002)}, "memory": memory},
    }
    made = HEADER | {"task": "documents", "headline": "anls", "samples": 150, "schemes": schemes}
    text = tables.widths_table([made])
    assert "documents, 150 samples:" in text
    assert "| klt | 0.93 | 1.15 | 0.800 ± 0.400 | 0.00200 ± 0.00100 |" in text
    assert "| 16-bit | 0.93 | 1.15 | 0.900 ± 0.450 |  |" in text


def test_the_summary_has_the_specs_of_all_tasks_with_their_divergence():
    memory = {"nominal_bits": 0.93, "bits_per_element": 3.3, "visual_bits_per_element": 1.149}

    def scheme(kl):
        return {"metrics": {"anls": interval(0.8), "kl": interval(kl)}, "memory": memory}

    reference = {"metrics": {"anls": interval(0.9)}, "memory": memory}
    few = {"16-bit": reference, "klt": scheme(0.002)}
    made = [
        HEADER | {"task": "captions", "samples": 60, "schemes": few},
        HEADER | {"task": "documents", "samples": 150, "schemes": few | {"klt 2": scheme(0.001)}},
    ]
    text = tables.widths_summary(made)
    assert "| klt | 1.15 | 0.00200 ± 0.00100 | 0.00200 ± 0.00100 |" in text
    assert "60 / 150 samples" in text
    assert "16-bit" not in text
    assert "klt 2" not in text


def test_choices_show_every_task_and_the_mean():
    text = tables.choices_table([HEADER | COUNTS | {"rows": {"preset": row(0.004)}}])
    assert "| preset | 1.15 | 0.00400 ± 0.00200 | 0.00400 ± 0.00200 | 0.00400 |" in text
    assert "64 calibration samples and 96 held-out ones" in text


@pytest.mark.parametrize("missing", ["bits", "tasks"])
def test_a_row_without_numbers_is_noticed(missing):
    broken = {key: value for key, value in row(0.1).items() if key != missing}
    with pytest.raises(KeyError, match=missing):
        tables.choices_table([HEADER | COUNTS | {"rows": {"preset": broken}}])
