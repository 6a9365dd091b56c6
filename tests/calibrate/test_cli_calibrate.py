"""`duotone calibrate` from the command line, on the embedded model with very few samples."""

import inspect
import json
from contextlib import contextmanager

import pytest
from cli_runs import error_of, run

from duotone.calibrate import Settings
from duotone.cli.calibrate import command

SMALL = ("--task", "documents", "-n", "1", "--device", "cpu")
REFUSED = {
    "an unknown task": (("--task", "nothing"), "a task must be one of"),
    "no samples": ((*SMALL, "-n", "0"), "samples must be between 1"),
    "too many bits": ((*SMALL, "--bits", "9"), "bits per channel must lie in [0.125, 4]"),
    "no bits": ((*SMALL, "--bits", "0"), "bits per channel must lie in [0.125, 4]"),
    "a task twice": ((*SMALL, "--task", "documents"), "tasks must have different names"),
    "another model without samples": (("some/model",), "must be named for 'some/model'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_any_work(name, tmp_path):
    arguments, message = REFUSED[name]
    assert message in error_of("calibrate", *arguments, "-o", tmp_path / "mine")
    assert not list(tmp_path.iterdir())


def test_existing_files_and_bad_paths_are_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("duotone.loading.load", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "mine.json").write_text("{}")
    for out, message in (("mine", "never overwritten"), ("mine.json/a", "can be written")):
        assert message in error_of("calibrate", *SMALL, "-o", tmp_path / out)


def test_from_samples_to_a_spec_that_other_commands_take(tmp_path):
    result = run("calibrate", *SMALL, "--bits", "1", "-o", tmp_path / "mine", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["bits"] == pytest.approx(1.0, abs=0.02)
    assert report["files"] == [str(tmp_path / f"mine.{end}") for end in ("safetensors", "json")]
    other = ("documents", "-n", "1", "--device", "cpu", "--out", tmp_path / "results")
    used = run("evaluate", "--scheme", tmp_path / "mine.json", *other)
    assert used.exit_code == 0, used.output


def test_options_have_the_defaults_of_the_settings():
    options = inspect.signature(command).parameters
    ours = Settings().to_dict()
    shared = ours.keys() & options.keys()
    assert shared == {"bits", "foreground", "regularization"}
    assert {name: options[name].default for name in shared} == {name: ours[name] for name in shared}


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    @contextmanager
    def interrupted(_):
        yield lambda done, total: (_ for _ in ()).throw(KeyboardInterrupt)

    monkeypatch.setattr("duotone.cli.calibrate.progress_bar", interrupted)
    cut = run("calibrate", *SMALL, "-o", tmp_path / "mine")
    assert cut.exit_code not in (0, 2)
    assert not list(tmp_path.iterdir())
