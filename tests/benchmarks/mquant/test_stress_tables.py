"""Verdicts over rows: paired by sample, bold only beyond the interval."""

from benchmarks.mquant.beaten import beaten_by, lines
from benchmarks.mquant.quality_tables import quality_table, stress_of
from benchmarks.mquant.stress_tables import RECOMMENDED, is_better, stress_table

from made_up_results import HEADER


def result(recipe, by_sample, stress="none", **metrics):
    value = sum(by_sample) / len(by_sample)
    kl = {"value": value, "low": value, "high": value}
    task = {
        "samples": len(by_sample),
        "headline": "anls",
        "metrics": {"kl": kl, **metrics},
        "differences": {},
        "kl_by_sample": [[kl, 1] for kl in by_sample],
    }
    size = {"before": {"total": 4e6}, "after": {"total": 2e6}}
    about = {"bytes": size, "stress": stress, "calibration": [{"samples": 8}]}
    return {**HEADER, "recipe": recipe, **about, "tasks": {"documents": task}}


OURS = [0.5, 0.1, 0.2, 0.4, 0.3, 0.25, 0.35, 0.45]


def test_only_differences_of_all_samples_count():
    ours = result(RECOMMENDED, OURS)
    lower = result("quarot-w4a8", [x - 0.01 for x in OURS])
    mixed = result("awq-w4a8", [x + (0.1 if i % 2 else -0.11) for i, x in enumerate(OURS)])
    assert is_better(lower, ours, "documents")
    assert not is_better(mixed, ours, "documents")
    assert not is_better(ours, lower, "documents")
    assert not is_better(lower, None, "documents")
    text = stress_table([ours, lower, mixed])
    assert "| quarot-w4a8 | 2.0 | **0.30875 ± 0.00000** |" in text
    assert "1 of 2 cells" in text


def test_a_recipe_is_beaten_in_the_cells_where_another_is_better_beyond_the_interval():
    lower = [x - 0.01 for x in OURS]
    rows = [
        result(RECOMMENDED, OURS),
        result("awq-w4a8", lower),
        result(RECOMMENDED, lower, "normed x32"),
        result("awq-w4a8", OURS, "normed x32"),
        result("rtn-w4a8", OURS, "normed x32"),
        result("rtn-w8a8", [x - 0.1 for x in OURS]),
    ]
    found = beaten_by(rows)
    assert found == {
        RECOMMENDED: {("documents", "none"): ["awq-w4a8"]},
        "awq-w4a8": {("documents", "normed x32"): [RECOMMENDED]},
        "rtn-w4a8": {("documents", "normed x32"): [RECOMMENDED]},
    }
    assert "awq-w4a8: beaten in 1 cells (documents, normed x32: " in "\n".join(lines(found))


def test_stresses_are_columns_and_widths_other_than_w4a8_have_no_row():
    rows = [result(RECOMMENDED, OURS), result(RECOMMENDED, OURS, "normed x32")]
    text = stress_table([*rows, result("rtn-w8a8", OURS)])
    assert "| recipe | MB | none | normed x32 |" in text
    assert "rtn" not in text


def test_older_results_name_a_factor_and_those_without_answers_have_no_scores():
    assert stress_of({"outliers": 64.0}) == "visual x64"
    assert stress_of({}) == "none"
    answer = {"value": 0.9, "low": 0.8, "high": 1.0}
    text = quality_table([result("rtn-w4a8", OURS, anls=answer), result("awq-w4a8", OURS)])
    assert "rtn-w4a8" in text
    assert "awq-w4a8" not in text
