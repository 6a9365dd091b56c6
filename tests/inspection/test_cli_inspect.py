"""`duotone inspect` from the command line, on the embedded model with very few samples."""

import json

import pytest
from typer.testing import CliRunner

from duotone.cli import app
from duotone.loading import Loaded
from tiny_text import LetterTokenizer, text_model


def run(*arguments):
    return CliRunner().invoke(app, ["inspect", *(str(argument) for argument in arguments)])


SMALL = ("--task", "documents", "-n", "1", "--device", "cpu")
REFUSED = {
    "an unknown task": (("--task", "nothing"), "a task must be one of"),
    "no samples": ((*SMALL, "-n", "0"), "samples must be between 1"),
    "another model without samples": (("some/model",), "must be named for 'some/model'"),
    "a folder": ((*SMALL, "-o", "look"), "No such option: -o"),
    "a scheme": ((*SMALL, "--scheme", "kivi@2"), "No such option: --scheme"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_the_model_is_loaded(name, monkeypatch):
    monkeypatch.setattr("duotone.loading.load", lambda *_: pytest.fail("the model was loaded"))
    arguments, message = REFUSED[name]
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())


def test_from_samples_to_numbers():
    result = run(*SMALL, "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["total"]["gain"] > 1


def test_a_text_model_in_tables(tmp_path, monkeypatch):
    loaded = Loaded("words", text_model(), LetterTokenizer())
    monkeypatch.setattr("duotone.loading.load", lambda name, device: loaded)
    row = {"question": "once upon a time there was " * 8, "answers": ["x"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    result = run("words", "--task", tmp_path / "rows.jsonl", "-n", "1")
    assert result.exit_code == 0, result.output
    shown = " ".join(result.output.split())
    assert "less error expected" in shown


def test_prompts_without_pictures_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"question": "why ?", "answers": ["x"]}))
    result = run("--task", tmp_path / "rows.jsonl", "-n", "1", "--device", "cpu")
    assert result.exit_code == 2
    assert "are of its visual tokens" in " ".join(result.output.split())


def test_the_help_has_an_example():
    result = run("--help")
    assert result.exit_code == 0
    assert "duotone inspect -n 4" in result.output
