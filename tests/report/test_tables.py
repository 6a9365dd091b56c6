import json
from pathlib import Path

import pytest

from duotone.cli import app
from duotone.report import tables as report

HEADER = {
    "schema": "duotone.quality/1",
    "created": "2026-01-02T03:04:05+00:00",
    "commit": "0123456789abcdef",
    "versions": {"torch": "2.13.0", "python": "3.11"},
    "device": "NVIDIA H200",
}


def interval(value, half_width=0.01):
    return {"value": value, "low": value - half_width, "high": value + half_width}


def scheme(value, bits):
    return {
        "metrics": {"anls": interval(value), "kl": interval(2 * value)},
        "memory": {"bits_per_element": 16.0, "visual_bits_per_element": bits},
    }


def result(task="documents"):
    taus = [(a, b) for a in (0, 1) for b in (0, 1)]
    grid = {f"paper-1 tau {a},{b}": {"anls": interval(0.5 + a - b / 4)} for a, b in taus}
    reference = scheme(0.9, 16.0)
    del reference["metrics"]["kl"]
    return HEADER | {
        "task": task,
        "headline": "anls",
        "samples": 500,
        "later_question": task == "captions",
        "tau_grid": {"samples": 200, "chosen": {"paper-1": [1, 0]}, "metrics": grid},
        "schemes": {
            "16-bit": reference,
            "good @1": scheme(0.89, 1.125),
            "bad|worse @1": scheme(0.45, 1.12),
        },
        "differences": {
            "good @1 - 16-bit": {"anls": interval(-0.01, 0.02)},
            "bad|worse @1 - 16-bit": {"anls": interval(-0.45, 0.02)},
        },
    }


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "quality").mkdir()
    (tmp_path / "quality/a.json").write_text(json.dumps(result()))
    (tmp_path / "quality/b.json").write_text(json.dumps(result("captions")))
    (tmp_path / "other.json").write_text("[1, 2]")
    return tmp_path


def test_quality_table_has_values_changes_and_bold_for_no_difference():
    text = report.quality_table([result()])
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
    text = report.quality_table([captions])
    assert "documents, anls | documents, object recall |" in text
    assert "| **0.800 ± 0.010 (+0.0 %)** |" in text


def test_the_summary_has_the_preset_first_and_calibquant_at_one_bit():
    full = result()
    names = ["calibquant @8", "duotone @2", "calibquant, no tau @1", "duotone @1"]
    for name in names:
        full["schemes"][name] = full["schemes"]["good @1"]
        full["differences"][f"{name} - 16-bit"] = full["differences"]["good @1 - 16-bit"]
    rows = report.quality_summary([full]).splitlines()
    kept = [row.split(" | ")[0].strip("| ") for row in rows if row.startswith("| ")]
    expected = ["16-bit", "duotone @1", "calibquant, no tau @1", "duotone @2"]
    assert kept == ["scheme @ bits", "---", *expected]


def test_text_table_has_bits_and_changes():
    row = {
        "memory": {"nominal_bits": 2.0, "bits_per_element": 3.25, "total_bytes": 9 * 12_345},
        "perplexity": interval(5.5),
        "difference": interval(0.25, 0.05),
        "spec": {"dense_dtype": "float8_e4m3fn"},
    }
    about = {"model": "stories", "dtype": "float32", "documents": 9, "context": 64, "window": 8}
    text = report.text_table([HEADER | about | {"schemes": {"kivi @2": row}}])
    assert "stories, float32, 9 documents of up to 64 tokens, 8 recent tokens" in text
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
        "8 bit": row | {"spec": {"dense_dtype": "float8_e4m3fn"}},
    }
    about = {"model": "stories", "documents": 9, "context": 64, "window": 8, "schemes": rows}
    lines = report.text_table([HEADER | about | {"dtype": "float32"}]).splitlines()
    assert [line[:30] for line in lines[4:7]] == [
        "| 16-bit | 16.00 | 16.00 | 20 ",
        "| model | 2.00 | 4.80 | 6 | 5.",
        "| 8 bit | 2.00 | 8.00 | 10 | 5",
    ]
    wide = report.text_table([HEADER | about | {"dtype": "bfloat16"}]).splitlines()
    assert wide[5].startswith("| model | 2.00 | 8.00 | 10 |")


def test_scheme_table_has_bits_bytes_score_and_divergence():
    data = result() | {"window": 32}
    stream = {"nominal_bits": 2.0, "bits_per_element": 3.25, "visual_bits_per_element": 0.0}
    for scheme in data["schemes"].values():
        scheme["memory"] |= {"nominal_bits": 1.0, "total_bytes": data["samples"] * 7_000}
    data["schemes"]["good @1"]["memory"] |= stream
    lines = report.scheme_table([data]).splitlines()
    assert f"{data['samples']} samples, windows of 32:" in lines[0]
    row = next(line for line in lines if line.startswith("| good @1"))
    assert row.startswith("| good @1 | 2.00 |  | 3.25 | 7 | ")
    assert row.endswith("| 1.7800 ± 0.0100 |")


def test_rows_of_8_bit_windows_are_marked_where_their_names_do_not_say_so():
    data = result() | {"window": 32}
    for scheme in data["schemes"].values():
        scheme["memory"] |= {"nominal_bits": 1.0, "total_bytes": 1000, "bits_per_element": 3.0}
    plain = report.scheme_table([data])
    assert "8-bit window" not in plain
    spec = {"dense_dtype": "float8_e4m3fn"}
    marked = data["schemes"]["good @1"] | {"configuration": {"spec": spec}}
    data["schemes"] |= {"good @1": marked, "fp8": marked}
    data["differences"]["fp8 - 16-bit"] = data["differences"]["good @1 - 16-bit"]
    table = report.scheme_table([data])
    assert "| good @1 (8-bit window) |" in table
    assert "| fp8 |" in table
    assert "Rows marked *8-bit window* are of a window of 64 tokens" in table


def test_divergence_table_leaves_the_reference_out():
    text = report.divergence_table([result()])
    assert "| good @1 | 1.7800 ± 0.0100 |" in text
    assert "| 16-bit |" not in text


def test_tau_grid_is_whole_and_marks_the_choice():
    text = report.tau_grids([result()])
    assert "| tau1 = 0 | 0.500 | 0.250 |" in text
    assert "| tau1 = 1 | **1.500** | 1.250 |" in text


def test_tables_are_found_below_a_folder(folder):
    rendered = report.tables(folder)
    assert set(rendered) == {"quality", "quality-summary", "divergence", "tau-grids"}
    assert "documents, anls | captions (question asked later), anls |" in rendered["quality"]


def test_marked_tables_are_replaced_and_the_rest_stays():
    text = "before\n<!-- duotone:quality -->\nold\n<!-- /duotone:quality -->\nafter\n"
    once = report.update_text(text, {"quality": "| new |"})
    assert once == "before\n<!-- duotone:quality -->\n| new |\n<!-- /duotone:quality -->\nafter\n"
    assert report.update_text(once, {"quality": "| new |"}) == once


def test_a_marker_without_results_raises():
    with pytest.raises(ValueError, match="none for 'speed'"):
        report.update_text("<!-- duotone:speed -->\n<!-- /duotone:speed -->", {"quality": ""})


def test_the_command_updates_and_checks_a_file(folder):
    from typer.testing import CliRunner

    readme = folder / "README.md"
    readme.write_text("<!-- duotone:quality -->\n<!-- /duotone:quality -->\n")
    arguments = ["report", "--results", str(folder), "--readme", str(readme)]
    assert CliRunner().invoke(app, [*arguments, "--check"]).exit_code == 1
    assert "| 16-bit |" not in readme.read_text()
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert "| 16-bit |" in readme.read_text()
    assert CliRunner().invoke(app, [*arguments, "--check"]).exit_code == 0
    missing = CliRunner().invoke(app, ["report", "--results", str(folder / "gone")])
    assert missing.exit_code == 2


def test_the_speedups_in_the_readme_are_those_of_the_kernels_file():
    home = Path(__file__).parents[1]
    rows = json.loads((home / "results/kernels/h200.json").read_text())["rows"]
    shape = {"batch": 32, "q_heads": 32, "kv_heads": 8, "tokens": 8192, "head_dim": 128}
    found = {
        row["row"]: row["speedup"]
        for row in rows
        if row["shape"] == shape and row["impl"] == "cuda" and row["status"] == "ok"
    }
    one, tau, two = (found[name] for name in ("1 bit", "1 bit, tau", "2 bit"))
    readme = " ".join((home / "README.md").read_text().split())
    among = "{:.1f}x the fastest 16-bit attention at 1 bit, {:.1f}x with score calibration, {:.1f}x"
    alone = "a launch by itself {:.1f}x, {:.1f}x and {:.1f}x (32 sequences of 8,192 tokens"
    assert among.format(*(x["rotated"] for x in (one, tau, two))) + " at 2 bits" in readme
    assert alone.format(*(x["clean"] for x in (one, tau, two))) in readme


def test_the_throughput_in_the_readme_is_that_of_its_files():
    home = Path(__file__).parents[1]
    speeds: dict[tuple, dict[str, float]] = {}
    for path in (home / "results/throughput").rglob("*.json"):
        result = json.loads(path.read_text())
        at = result["configuration"]
        key = (result["model"]["name"], at["visual"], at["budget_bytes"])
        speeds.setdefault(key, {})[at["row"]] = result["decode_tokens_per_s"]

    def ratios_of(*names: str) -> list[float]:
        found = (
            (row, speed / rows["16-bit"]) for rows in speeds.values() for row, speed in rows.items()
        )
        return [ratio for row, ratio in found if row in names]

    ratios = ratios_of("1-bit visual", "1-bit visual, 2-bit text")
    integer = ratios_of("1-bit visual, 2-bit text, W8A8")
    readme = " ".join((home / "README.md").read_text().split())
    assert f"decodes {min(ratios):.1f} to {max(ratios):.0f} times the tokens per second" in readme
    wanted = f"with W8A8 weights and KIVI's 2-bit stream {min(integer):.1f} to {max(integer):.0f}"
    assert f"{wanted} times" in readme
    ours, theirs = "1-bit visual, 2-bit text, W8A8", "16-bit, W8A8"
    both = [rows[ours] / rows[theirs] for rows in speeds.values()]
    assert f"W8A8 weights on both sides {min(both):.1f} to {max(both):.0f} times" in readme
