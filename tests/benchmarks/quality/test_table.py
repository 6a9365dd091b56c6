"""Files of the quality tables: rows, differences, the grid of tau, and scores computed again."""

import json
from argparse import Namespace
from types import SimpleNamespace

import pytest

from benchmarks.quality import rows as rows_of
from benchmarks.quality import table as script
from duotone import scheme
from duotone.loading import Loaded
from duotone.report import tables as report
from duotone.tasks.metrics import Score
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model

ASKED = {"samples": 2, "calibration": 1, "batch_size": 4, "minutes": None, "workers": 0}
ASKED |= {"impl": "auto", "window": 32, "later_question": False, "rescore_later": False}
ASKED |= {"stress": "none"}


@pytest.fixture(scope="module")
def loaded():
    return Loaded("tiny", tiny_model(), TinyProcessor())


@pytest.fixture(scope="module")
def folder(loaded, tmp_path_factory):
    """The files of "ingredients", with divergences."""
    out = tmp_path_factory.mktemp("ingredients")
    asked = Namespace(**ASKED | {"out": out, "later_question": True})
    assert script.ingredients(loaded, TINY_TASK, asked) == "tiny-later"
    return out


@pytest.fixture
def data(folder):
    return json.loads((folder / "tiny-later.json").read_text())


def test_equal_specs_run_once(loaded):
    specs = rows_of.table_specs(8, None)
    data, evaluation = script.table_of_task(loaded, TINY_TASK, specs, Namespace(**ASKED), "x/1")
    assert list(data["schemes"]) == ["16-bit", *specs]
    assert len(evaluation.results) == 1 + len(set(specs.values())) < len(specs)
    for label, spec in specs.items():
        assert specs[data["schemes"][label]["ran_as"]] == spec


def test_best_tau_takes_the_score_then_agreement_then_the_smaller_pair():
    scores = {
        f"x tau {a},{b}": {"anls": Score.mean([a == 1]), "same_tokens": Score.mean([b >= 2])}
        for a in rows_of.TAUS
        for b in rows_of.TAUS
    }
    assert script.best_tau(SimpleNamespace(scores=scores), TINY_TASK, "x") == (1, 2)


@pytest.mark.slow
def test_the_file_holds_all_rows_differences_and_the_grid(data):
    assert data["task"] == "tiny"
    assert len(data["schemes"]) == 1 + 4 * 9 + 2 * 2 + 5
    assert len(data["tau_grid"]["metrics"]) == 1 + 48
    prefixes = {"calibquant-1", "calibquant-paper-1", "calibquant-paper-2"}
    assert set(data["tau_grid"]["chosen"]) == prefixes
    assert {"anls", "same_tokens"} <= set(data["differences"]["duotone @1 - 16-bit"])
    at_8, at_1 = (data["schemes"][f"lloyd @{bits}"]["metrics"]["kl"] for bits in (8, 1))
    assert at_8["value"] < 0.01 * at_1["value"]


@pytest.mark.slow
def test_the_report_renders_what_the_script_wrote(folder):
    rendered = report.tables(folder)
    assert "| duotone @1 |" in rendered["quality"]
    assert rendered["tau-grids"].count("tau1 = 3") == 3


def test_schemes_are_asked_later_and_rendered(loaded, tmp_path, monkeypatch):
    rows = {label: scheme(label) for label in ("duotone", "kivi", "minmax")}
    monkeypatch.setattr(script, "picture_rows", lambda window, depth: rows)
    asked = Namespace(**ASKED | {"out": tmp_path, "samples": 3, "rows": "duotone;minmax"})
    assert script.schemes(loaded, TINY_TASK, asked) == "tiny"
    data = json.loads((tmp_path / "tiny.json").read_text())
    assert list(data["schemes"]) == ["16-bit", "duotone", "minmax"]
    assert data["later_question"]
    assert data["schemes"]["minmax"]["metrics"]["kl"]["value"] > 0
    assert data["differences"]["minmax - 16-bit"]["anls"]
    nominal = scheme("duotone").nominal_bits(
        loaded.model.config.get_text_config().num_hidden_layers
    )
    assert f"| duotone | {nominal:.2f} |" in report.tables(tmp_path)["schemes"]
    assert len((tmp_path / "tiny.answers.jsonl").read_text().splitlines()) == 3


def rescored(folder, out, monkeypatch):
    monkeypatch.setitem(script.TASKS, "tiny", TINY_TASK)
    script.rescore(folder, out)
    (path,) = out.glob("*.json")
    return json.loads(path.read_text())


@pytest.mark.slow
def test_rescoring_stored_answers_gives_the_same_scores(data, folder, tmp_path, monkeypatch):
    again = rescored(folder, tmp_path, monkeypatch)
    assert again["schemes"] == data["schemes"]
    assert again["differences"] == data["differences"]


def test_metrics_left_out_are_added_by_rescoring(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(
        script, "picture_rows", lambda window, depth: {"duotone": scheme("duotone")}
    )
    asked = Namespace(**ASKED | {"out": tmp_path, "rows": None})
    script.schemes(loaded, TINY_TASK, Namespace(**vars(asked) | {"out": tmp_path / "whole"}))
    asked.rescore_later = True
    script.schemes(loaded, TINY_TASK, asked)
    data, whole = (
        json.loads((folder / "tiny.json").read_text()) for folder in (tmp_path, tmp_path / "whole")
    )
    assert "anls" not in data["schemes"]["duotone"]["metrics"]
    again = rescored(tmp_path, tmp_path / "again", monkeypatch)
    name = ("schemes", "duotone", "metrics", "anls")
    for key in name:
        again, whole = again[key], whole[key]
    assert again == whole


@pytest.mark.slow
def test_rescoring_notices_other_answers(data, folder, tmp_path, monkeypatch):
    lines = (folder / "tiny-later.answers.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for row in rows:
        row["given"][data["schemes"]["duotone @1"]["ran_as"]] = "one"
    changed = tmp_path / "changed"
    changed.mkdir()
    (changed / "tiny-later.answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (changed / "tiny-later.json").write_text(json.dumps(data))
    again = rescored(changed, tmp_path / "again", monkeypatch)
    assert again["schemes"]["duotone @1"]["metrics"]["anls"]["value"] == 1.0
    assert again["differences"]["duotone @1 - 16-bit"]["anls"]["value"] == 1.0
