"""Tables of transform coding hold every number of their files."""

import pytest

from tables import transform as tables

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


def test_choices_show_every_task_and_the_mean():
    text = tables.choices_table([HEADER | COUNTS | {"rows": {"preset": row(0.004)}}])
    assert "| preset | 1.15 | 0.00400 ± 0.00200 | 0.00400 ± 0.00200 | 0.00400 |" in text
    assert "64 calibration samples and 96 held-out ones" in text


def test_robustness_has_a_table_per_question():
    rows = {"tasks": {"on captions": row(0.1)}, "long spans": {"klt": row(0.2, ("sequences",))}}
    text = tables.robustness_table([HEADER | COUNTS | {"rows": rows | {"none": {}}}])
    assert text.index("**Tasks**") < text.index("**Long spans**")
    assert "| klt | 1.15 | 0.20000 ± 0.10000 |\n" in text
    assert "None" not in text


def test_cost_shows_shares():
    window = {"plain": 30.0, "bases": 36.0, "extra_us": 6.0, "extra_share_of_16_bit": 0.025}
    decode = {"best_16_bit": "cudnn", "best_16_bit_us": 240.0, "window 128": window}
    made = {"layers": 32, "sequences": 36, "visual_tokens_per_sequence": 3328, "seconds": 41.6}
    made["bytes_above_model"] = 2**30
    text = tables.cost_table([HEADER | {"decode": decode, "calibration": made}])
    assert "| 128 | 30.0 | 36.0 | 6.0 | 2.5 % |" in text
    assert "42 s, 1.0 GiB above the model" in text


@pytest.mark.parametrize("missing", ["bits", "tasks"])
def test_a_row_without_numbers_is_noticed(missing):
    broken = {key: value for key, value in row(0.1).items() if key != missing}
    with pytest.raises(KeyError, match=missing):
        tables.choices_table([HEADER | COUNTS | {"rows": {"preset": broken}}])


def test_text_of_small_models_shows_bits_and_divergence():
    klt = {"perplexity": interval(3.6), "difference": interval(0.1), "kl": interval(0.02)}
    klt |= {"code_bits": 1.0, "packed_bits": 1.77, "bits": 4.2}
    made = {"model": "stories", "layers": 5, "head_dim": 8, "documents": 50, "context": 512}
    made |= {"window": 32, "calibration_documents": 48, "dtype": "float32"}
    schemes = {"16-bit": {"perplexity": interval(3.5)}, "klt": klt}
    text = tables.transform_text_table([HEADER | made | {"schemes": schemes}])
    assert "| klt | 1.00 | 1.77 | 4.20 | 0.0200 ± 0.0100 | 3.600 ± 1.800 | 0.100 ± 0.050 |" in text
    assert "heads of 8 channels" in text
