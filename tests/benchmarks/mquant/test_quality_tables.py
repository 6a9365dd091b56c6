"""Tables of static W4A8's quality hold the numbers of their files."""

from benchmarks.mquant import quality_tables as tables

HEADER = {"created": "2026-01-02T03:04:05+00:00", "commit": "0123456789abcdef", "device": "H200"}
HEADER |= {"versions": {"torch": "2.11"}}


def interval(value):
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


def recipe(name, score, kl, difference=None):
    task = {"samples": 64, "headline": "anls", "differences": {}}
    task |= {"metrics": {"anls": interval(score), "kl": interval(kl)}}
    made = HEADER | {"recipe": name, "tasks": {"documents": task}}
    if difference is None:
        return made
    task["differences"] = {"anls": interval(difference)}
    made["bytes"] = {"before": {"total": 23e6}, "after": {"total": 7.5e6}}
    return made | {"calibration": [{"samples": 24}]}


def test_quality_has_recipes_in_order_and_the_size_before():
    rows = [recipe("rtn-w4a8", 0.8, 0.3, -0.1), recipe("mquant-w8a8", 0.9, 0.1, 0.0)]
    rows += [recipe("mquant-w4a8", 0.9, 0.2, 0.01), recipe("bf16", 0.9, 0.0)]
    lines = tables.quality_table(rows).splitlines()
    names = [line.split(" | ")[0][2:] for line in lines[2:6]]
    assert names == ["bf16", "mquant-w4a8", "rtn-w4a8", "mquant-w8a8"]
    assert lines[2].startswith("| bf16 | 23.0 | 0.900 ± 0.100 |  |  |")
    assert "| 7.5 | 0.800 ± 0.100 | -0.100 [-0.200, +0.000] | 0.30000 ± 0.10000 |" in lines[4]
    assert "64 held-out and 24 calibration samples" in lines[-1]


def test_outlier_channels_have_a_table_of_their_own():
    rows = [recipe("bf16", 0.9, 0.0), recipe("static-w4a8", 0.8, 0.3, -0.1)]
    rows.append(recipe("static-w4a8", 0.5, 0.9, -0.4) | {"outliers": 64.0})
    plain, grown = tables.quality_table(rows).split("**With outlier channels, 64 times as large**")
    assert "| bf16 |" in plain
    assert "0.800 ±" in plain
    assert "0.500" not in plain
    assert "| bf16 |" in grown
    assert "0.500 ±" in grown
    assert "0.800 ±" not in grown


def test_the_summary_has_divergences_without_and_with_outlier_channels():
    rows = [recipe("bf16", 0.9, 0.0), recipe("smoothquant-w4a8", 0.7, 0.4, -0.2)]
    rows += [recipe("rtn-w4a8", 0.8, 0.3, -0.1), recipe("mquant-w4a8", 0.9, 0.2, 0.01)]
    rows.append(recipe("rtn-w4a8", 0.5, 0.9, -0.4) | {"outliers": 64.0})
    lines = tables.quality_summary(rows).splitlines()
    assert lines[0].endswith("| documents, KL (nats) | documents, outliers x 64, KL (nats) |")
    assert lines[2] == "| mquant-w4a8 | 7.5 | 0.20000 ± 0.10000 |  |"
    assert lines[3] == "| rtn-w4a8 | 7.5 | 0.30000 ± 0.10000 | 0.90000 ± 0.10000 |"
    assert not lines[4]


def test_memory_has_a_column_per_part():
    text = tables.memory_table(
        [HEADER | {"rows": [{"recipe": "bf16", "vision": 1e9, "total": 2e9}]}]
    )
    assert "| GB | vision | total |" in text
    assert "| bf16 | 1.00 | 2.00 |" in text
