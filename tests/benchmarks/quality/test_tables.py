"""Cells that results lack; `report/test_pages.py` has all others."""

from benchmarks.quality import tables

from made_up_results import HEADER, interval, result


def test_cells_of_a_task_that_lacks_a_scheme_are_empty():
    few = result("captions")
    del few["schemes"]["good @1"]
    text = tables.quality_table([result(), few])
    assert "| good @1 | 1.12 | **0.890 ± 0.010 (-1.1 %)** |  |" in text
    for one in few["schemes"].values():
        one["metrics"].pop("kl", None)
        one["metrics"]["anls"]["value"] = 0.0
    assert "| 1.7800 ± 0.0100 |  |" in tables.divergence_table([result(), few])
    assert "| bad\\|worse @1 | 1.12 | 0.000 ± 0.010 |" in tables.quality_table([few])


def test_the_summary_takes_a_divergence_from_the_tasks_that_have_it():
    both = result(), result("captions")
    for one in both:
        one["schemes"]["duotone @1"] = one["schemes"].pop("good @1")
    del both[0]["schemes"]["duotone @1"]["metrics"]["kl"]
    del both[1]["schemes"]["bad|worse @1"]
    row = tables.scheme_summary(both).splitlines()[2]
    assert row == "| duotone @1 | 1.12 |  | 1.7800 ± 0.0100 |"


def test_results_without_a_grid_say_so():
    assert tables.tau_grids([result() | {"tau_grid": None}]).startswith("No grid was searched")


def test_numbers_of_a_16_bit_model_are_counted_as_they_are():
    memory = {"nominal_bits": 2.0, "bits_per_element": 8.0, "total_bytes": 90_000}
    row = {"memory": memory | {"dense_bytes": 72_000}, "spec": {"recent": 8}}
    row |= {"perplexity": interval(5.5), "difference": interval(0.25, 0.05)}
    about = {"model": "stories", "documents": 9, "context": 64, "window": 8, "dtype": "bfloat16"}
    text = tables.text_table([HEADER | about | {"schemes": {"model": row}}])
    assert "| model | 2.00 | 8.00 | 10 |" in text
