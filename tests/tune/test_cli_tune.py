"""`duotone tune` from the command line, on the embedded model with very few samples."""

import json

import pytest
from cli_runs import error_of, run
from PIL import Image

import duotone
from duotone.cli.common import scheme_spec
from duotone.loading import Loaded
from duotone.tasks import get_task
from duotone.tune import TuneSettings, make_job
from tiny_vlm import TinyProcessor, tiny_model

pytest.importorskip("optuna")


SMALL = ("documents", "-n", "2", "--heldout", "2", "--batch-size", "2", "--device", "cpu")

REFUSED = {
    "no budget": (SMALL, "one budget above 0"),
    "two budgets": ((*SMALL, "-b", "1", "--budget-bytes", "9"), "one budget above 0"),
    "a budget out of reach": ((*SMALL, "-b", "0.01"), "the space's smallest caches take"),
    "bytes out of reach": ((*SMALL, "--budget-bytes", "100"), "the space's smallest caches take"),
    "an unknown task": (("nothing", "-b", "1.3"), "a task must be one of"),
    "too few samples": (("documents", "-n", "0", "-b", "1.3"), "at least one sample"),
    "an unknown sampler": ((*SMALL, "-b", "1.3", "--sampler", "grid"), "sampler must be one of"),
    "a task twice": (("documents", "documents", "-b", "1.3"), "different names"),
    "made-up samples": (("made-up", "-b", "1"), "made-up samples have no answers"),
    "written text": (("written", "-b", "1"), "that a model writes itself has no answers"),
    "another model without samples": (("-b", "1", "--model", "some/model"), "must be named"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_any_work(name, tmp_path):
    arguments, message = REFUSED[name]
    assert message in error_of("tune", "--out", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_folder_with_other_files_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("")
    refused = error_of("tune", "--out", tmp_path, *SMALL, "-b", "1.3")
    assert "with other files in it" in refused


def test_a_predicted_bound_is_below_what_is_measured(tmp_path):
    settings = TuneSettings(budget_bits=4.0, samples=2, heldout=2, batch_size=2)
    with (tmp_path / "mine.jsonl").open("w") as rows:
        for shade in range(4):
            Image.new("RGB", (8, 8), (60 * shade, 10, 10)).save(tmp_path / f"{shade}.png")
            row = {"question": "what is this ?", "answers": ["red"], "images": [f"{shade}.png"]}
            rows.write(json.dumps(row) + "\n")
    loaded = Loaded("tiny", tiny_model(), TinyProcessor())
    job = make_job(loaded, [get_task(str(rows.name))], settings, tmp_path / "out")
    meter = job.meter(job.prefilled(job.encoded, "16-bit answers"))
    for name in ("duotone", "minmax"):
        spec = duotone.scheme(name)
        assert 0.5 < job.predict(spec) / meter.outcome(spec).bits <= 1


@pytest.mark.slow
def test_from_samples_to_a_spec_that_other_commands_take(tmp_path):
    out = tmp_path / "tuned"
    options = ("tune", "--out", out, *SMALL, "-b", "1.3", "--portable")
    first = run(*options, "--trials", "3", "--no-scores", "--no-plot")
    assert first.exit_code == 0, first.output
    second = run(*options, "--trials", "6", "--json")
    assert second.exit_code == 0, second.output
    report = json.loads(second.stdout)
    assert report == json.loads((out / "report.json").read_text())
    assert report["trials"]["measured"] + report["trials"]["pruned"] == 6
    spec = scheme_spec(str(out / "spec.json"), None)
    assert spec == duotone.CacheSpec.from_dict(report["specs"][report["verdict"]["kept"]])
    assert (out / "found.json").exists() == (report["verdict"]["kept"] != "chosen")
    assert report["heldout"]["chosen"]["bits"] <= 1.3
    assert len(report["comparisons"]) == len(report["published"]) >= 10
    assert set(report["scores"]["documents"]["schemes"]) >= {"16-bit", "chosen", "duotone @1"}
    assert (out / "front.png").stat().st_size > 10_000
    assert "Published schemes" in (out / "report.md").read_text()
    assert "seed: 0 -> 5" in error_of(*options, "--trials", "9", "--seed", "5")
