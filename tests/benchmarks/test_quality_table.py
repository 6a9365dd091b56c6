import json
from types import SimpleNamespace

import pytest
import quality_rows as rows_of
import quality_table as script

import duotone
from duotone.loading import Loaded
from duotone.report import tables as report
from duotone.tasks.metrics import Score
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model


@pytest.fixture(scope="module")
def outcome():
    loaded = Loaded("tiny", tiny_model(), TinyProcessor())
    plan = script.Plan(2, 1, 4, kl=True, later_question=False, minutes=None, workers=0)
    return script.table_of_task(loaded, TINY_TASK, plan)


def test_the_grid_is_4_by_4_for_every_range():
    for bits, ranges in ((1, 2), (2, 1)):
        specs = rows_of.grid_specs(bits)
        assert len(specs) == len(set(specs.values())) == 16 * ranges
    assert rows_of.grid_specs(1)["calibquant-1 tau 2,3"].visual.key.shrink == 0.5


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
    preset = duotone.scheme("duotone")
    one_width, alike, no_gain, sequence = rows_of.ablations(preset).values()
    assert one_width.visual.key.classes is one_width.visual.value.classes is None
    assert one_width.visual.key.group == preset.visual.key.group
    assert alike.visual.key.energy == alike.visual.value.energy == 0
    assert no_gain == preset.replace(
        visual=preset.visual.replace(value=preset.visual.value.replace(gain=1.0))
    )
    assert sequence == preset.replace(ranges="sequence")


def test_equal_specs_run_once():
    specs = rows_of.table_specs(8, None)
    to_run, ran = script.distinct(specs)
    assert set(ran) == set(specs)
    assert len(to_run) == len(set(specs.values())) < len(specs)
    assert all(specs[label] == to_run[source] for label, source in ran.items())


def test_best_tau_takes_the_score_then_agreement_then_the_smaller_pair():
    scores = {
        f"x tau {a},{b}": {"anls": Score.mean([a == 1]), "same_tokens": Score.mean([b >= 2])}
        for a in rows_of.TAUS
        for b in rows_of.TAUS
    }
    assert script.best_tau(SimpleNamespace(scores=scores), TINY_TASK, "x") == (1, 2)


def test_the_file_holds_all_rows_differences_and_the_grid(outcome):
    data, _ = outcome
    assert json.loads(json.dumps(data))["task"] == "tiny"
    assert len(data["schemes"]) == 1 + 4 * 7 + 2 * 2 + 5
    assert len(data["tau_grid"]["metrics"]) == 1 + 48
    assert set(data["tau_grid"]["chosen"]) == {
        "calibquant-1",
        "calibquant-paper-1",
        "calibquant-paper-2",
    }
    difference = data["differences"]["duotone @1 - calibquant @1"]
    assert {"anls", "same_tokens", "kl"} <= set(difference)
    at_8, at_1 = (data["schemes"][f"lloyd @{bits}"]["metrics"]["kl"] for bits in (8, 1))
    assert at_8["value"] < 0.01 * at_1["value"]


def test_the_grid_of_an_earlier_run_is_taken_with_its_commit(outcome, tmp_path):
    data = outcome[0] | {"commit": "0123"}
    (tmp_path / "tiny.json").write_text(json.dumps(data))
    best, grid = script.earlier_tau(tmp_path, "tiny")
    assert best == {b: tuple(data["tau_grid"]["chosen"][f"calibquant-paper-{b}"]) for b in (1, 2)}
    assert grid["commit"] == "0123"
    assert grid["metrics"] == json.loads(json.dumps(data["tau_grid"]["metrics"]))


def test_the_report_renders_what_the_script_wrote(outcome, tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(outcome[0]))
    rendered = report.tables(tmp_path)
    assert "| duotone @1 |" in rendered["quality"]
    assert rendered["tau-grids"].count("tau1 = 3") == 3


def test_rescoring_stored_answers_gives_the_same_scores(outcome, tmp_path, monkeypatch):
    data, evaluation = outcome
    (tmp_path / "tiny.json").write_text(json.dumps(data))
    script.write_answers(tmp_path / "tiny.answers.jsonl", evaluation)
    monkeypatch.setitem(script.TASKS, "tiny", TINY_TASK)
    script.rescore(tmp_path, tmp_path / "again")
    again = json.loads((tmp_path / "again/tiny.json").read_text())
    assert again["schemes"] == json.loads(json.dumps(data["schemes"]))
    assert again["differences"] == data["differences"]


def test_metrics_left_out_are_added_by_rescoring(outcome, tmp_path, monkeypatch):
    loaded = Loaded("tiny", tiny_model(), TinyProcessor())
    plan = script.Plan(3, 2, 4, False, False, None, 0, bits=(1,), grid=False)
    data, evaluation = script.table_of_task(loaded, script.cheaply_scored(TINY_TASK), plan)
    assert "anls" not in data["schemes"]["duotone @1"]["metrics"]
    (tmp_path / "tiny.json").write_text(json.dumps(data))
    script.write_answers(tmp_path / "tiny.answers.jsonl", evaluation)
    monkeypatch.setitem(script.TASKS, "tiny", TINY_TASK)
    script.rescore(tmp_path, tmp_path / "again")
    again = json.loads((tmp_path / "again/tiny.json").read_text())
    whole = outcome[0]["schemes"]["duotone @1"]["metrics"]["anls"]
    assert again["schemes"]["duotone @1"]["metrics"]["anls"] == whole
    assert "anls" in again["differences"]["duotone @1 - 16-bit"]


def test_rescoring_notices_other_answers(outcome, tmp_path, monkeypatch):
    data, evaluation = outcome
    (tmp_path / "tiny.json").write_text(json.dumps(data))
    script.write_answers(tmp_path / "tiny.answers.jsonl", evaluation)
    rows = [json.loads(line) for line in (tmp_path / "tiny.answers.jsonl").read_text().splitlines()]
    for row in rows:
        row["given"][data["schemes"]["duotone @1"]["ran_as"]] = "one"
    (tmp_path / "tiny.answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    monkeypatch.setitem(script.TASKS, "tiny", TINY_TASK)
    script.rescore(tmp_path, tmp_path / "again")
    again = json.loads((tmp_path / "again/tiny.json").read_text())
    assert again["schemes"]["duotone @1"]["metrics"]["anls"]["value"] == 1.0
    assert again["differences"]["duotone @1 - 16-bit"]["anls"]["value"] == 1.0
