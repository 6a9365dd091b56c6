"""Tables of made-up qualities and schemes."""

from benchmarks.quality import tables

from made_up_results import HEADER, interval, result


def test_quality_table_has_values_changes_and_bold_for_no_difference():
    text = tables.quality_table([result()])
    assert "| scheme @ bits | true bits per visual number | documents, anls |" in text
    assert "| 16-bit | 16.00 | 0.900 ± 0.010 |" in text
    assert "| good @1 | 1.12 | **0.890 ± 0.010 (-1.1 %)** |" in text
    assert "| bad\\|worse @1 | 1.12 | 0.450 ± 0.010 (-50.0 %) |" in text
    assert "500 samples" in text
    assert "commit 0123456789;" in text


def test_captions_show_object_recall_beside_the_headline():
    captions = result()
    for name, one in captions["schemes"].items():
        one["metrics"]["object_recall"] = interval(0.8)
        if name != "16-bit":
            captions["differences"][f"{name} - 16-bit"]["object_recall"] = interval(0.0)
    text = tables.quality_table([captions])
    assert "documents, anls | documents, object recall |" in text
    assert "| **0.800 ± 0.010 (+0.0 %)** |" in text


def test_the_summary_asks_later_and_has_a_metric_per_task_and_the_preset_first():
    full = result() | {"task": "captions", "later_question": True}
    for one in full["schemes"].values():
        one["metrics"]["object_recall"] = interval(0.75)
    names = ["calibquant @8", "duotone @2", "calibquant, no tau @1", "duotone @1"]
    for name in names:
        full["schemes"][name] = full["schemes"]["good @1"]
        full["differences"][f"{name} - 16-bit"] = full["differences"]["good @1 - 16-bit"]
    for difference in full["differences"].values():
        difference["object_recall"] = interval(0.0)
    rows = tables.quality_summary([result(), full]).splitlines()
    kept = [row.split(" | ")[0].strip("| ") for row in rows if row.startswith("| ")]
    expected = ["16-bit", "duotone @1", "calibquant, no tau @1", "duotone @2"]
    assert kept == ["scheme @ bits", "---", *expected]
    columns = rows[0].strip("| ").split(" | ")
    assert columns[2:] == ["captions (question asked later), object recall"]


def test_text_table_has_bits_and_changes():
    row = {
        "memory": {"nominal_bits": 2.0, "bits_per_element": 3.25, "total_bytes": 9 * 12_345},
        "perplexity": interval(5.5),
        "difference": interval(0.25, 0.05),
        "spec": {"recent": 8},
    }
    about = {"model": "stories", "dtype": "bfloat16", "documents": 9, "context": 64, "window": 8}
    text = tables.text_table([HEADER | about | {"schemes": {"kivi @2": row}}])
    assert "stories, bfloat16, 9 documents of up to 64 tokens, 8 recent tokens" in text
    assert "| kivi @2 | 2.00 | 3.25 | 12 | 5.500 ± 0.010 | 0.250 ± 0.050 |" in text
    assert "commit 0123456789;" in text


def test_text_table_counts_numbers_of_a_32_bit_model_as_16_bit():
    memory = {"nominal_bits": 2.0, "bits_per_element": 8.0, "total_bytes": 90_000}
    row = {"memory": memory | {"dense_bytes": 72_000}, "spec": {"recent": 8}}
    row |= {"perplexity": interval(5.5), "difference": interval(0.25, 0.05)}
    dense = {"nominal_bits": 32, "bits_per_element": 32.0, "total_bytes": 360_000}
    rows = {
        "16-bit": row | {"memory": dense, "spec": None},
        "model": row,
    }
    about = {"model": "stories", "documents": 9, "context": 64, "window": 8, "schemes": rows}
    lines = tables.text_table([HEADER | about | {"dtype": "float32"}]).splitlines()
    assert [line[:30] for line in lines[4:6]] == [
        "| 16-bit | 16.00 | 16.00 | 20 ",
        "| model | 2.00 | 4.80 | 6 | 5.",
    ]
    wide = tables.text_table([HEADER | about | {"dtype": "bfloat16"}]).splitlines()
    assert wide[5].startswith("| model | 2.00 | 8.00 | 10 |")


def test_scheme_table_has_bits_bytes_score_and_divergence():
    data = result() | {"window": 32}
    stream = {"nominal_bits": 2.0, "bits_per_element": 3.25, "visual_bits_per_element": 0.0}
    for scheme in data["schemes"].values():
        scheme["memory"] |= {"nominal_bits": 1.0, "total_bytes": data["samples"] * 7_000}
    data["schemes"]["good @1"]["memory"] |= stream
    lines = tables.scheme_table([data]).splitlines()
    assert f"{data['samples']} samples, windows of 32:" in lines[0]
    row = next(line for line in lines if line.startswith("| good @1"))
    assert row.startswith("| good @1 | 2.00 |  | 3.25 | 7 | ")
    assert row.endswith("| 1.7800 ± 0.0100 |")


def test_the_summaries_take_their_rows_from_the_result_with_most_schemes():
    few, many = result(), result()
    few["schemes"]["kivi @2"] = few["schemes"].pop("bad|worse @1")
    del few["schemes"]["good @1"]
    stream = many["schemes"]["kivi @2"] = many["schemes"].pop("good @1")
    del stream["memory"]["visual_bits_per_element"]
    lines = tables.scheme_summary([few, many]).splitlines()
    assert lines[0] == "| scheme | true bits, pictures | documents, KL (nats) |"
    assert lines[2:4] == ["| kivi @2 |  | 1.7800 ± 0.0100 |", ""]
    row = {"memory": {"nominal_bits": 2.0, "bits_per_element": 3.0, "total_bytes": 9_000}}
    row |= {"perplexity": interval(5.5), "difference": interval(0.25), "spec": {}}
    about = HEADER | {"model": "stories", "dtype": "float32", "documents": 9, "context": 64}
    about |= {"window": 8}
    every = dict.fromkeys(("per token", "16-bit", "innerq @2", "kivi @2"), row)
    texts = [about | {"schemes": schemes} for schemes in ({"kivi @1": row}, every)]
    lines = tables.text_summary(texts).splitlines()
    names = [line.split(" | ")[0] for line in lines if line.startswith("| ")]
    assert names == ["| scheme", "| ---", "| 16-bit", "| kivi @2", "| innerq @2"]


def test_divergence_table_leaves_the_reference_out():
    text = tables.divergence_table([result()])
    assert "| good @1 | 1.7800 ± 0.0100 |" in text
    assert "| 16-bit |" not in text


def test_tau_grid_is_whole_and_marks_the_choice():
    text = tables.tau_grids([result()])
    assert "| tau1 = 0 | 0.500 | 0.250 |" in text
    assert "| tau1 = 1 | **1.500** | 1.250 |" in text
