"""`duotone evaluate` on files of one's own."""

import json
from contextlib import contextmanager

import pytest
from cli_runs import error_of, run

from duotone.defaults import TEXT, name_of
from tiny_text import LetterTokenizer


def test_evaluate_a_file_of_ones_own(tiny, picture, tmp_path):
    row = {"images": ["noise.png"], "question": "what is this ?", "answers": ["red"]}
    data = tmp_path / "mine.jsonl"
    data.write_text("\n".join([json.dumps(row)] * 3))
    asked = ("evaluate", data, "-s", "minmax", "-b", 1, "-b", 8, "--out", tmp_path / "results")
    result = run(*asked, "--json")
    assert result.exit_code == 0, result.output
    results = json.loads(result.stdout)
    assert list(results) == ["16-bit", "minmax-1bit", "minmax-8bit"]
    assert results["minmax-1bit"]["configuration"]["model"]["name"] == tiny.name
    assert len(list((tmp_path / "results").glob("*.json"))) == 3
    table = run(*asked).stdout
    assert "minmax-8bit" in table
    assert "3 samples" in table


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ids.json", "[[1, 2, 3, 4, 5, 6], [7, 8, 9]]"),
        ("texts.jsonl", '{"text": "once upon"}\n{"text": "a time"}'),
        ("book.txt", "once upon a time there was"),
    ],
)
def test_evaluate_perplexity_of_a_file(words_only, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    asked = ("evaluate", "perplexity", "--data", tmp_path / name, "--context", 16)
    asked += ("--scheme", "kivi", "--bits", 2, "--out", tmp_path / "results")
    result = run(*asked, "--json")
    assert result.exit_code == 0, result.output
    results = json.loads(result.stdout)
    assert list(results) == ["16-bit", "kivi-2bit"]
    assert results["kivi-2bit"]["metrics"]["perplexity"]["value"] > 1
    assert (results["16-bit"]["samples"], results["16-bit"]["configuration"]["context"]) == (2, 16)
    assert "perplexity, 2 samples" in run(*asked).stdout


def test_an_interrupted_evaluation_says_how_to_go_on(words_only, tmp_path, monkeypatch):
    @contextmanager
    def interrupted(_):
        yield lambda done, total: (_ for _ in ()).throw(KeyboardInterrupt)

    (tmp_path / "text.txt").write_text("once upon a time")
    asked = ("evaluate", "perplexity", "--data", tmp_path / "text.txt", "--out", tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr("duotone.cli.evaluate.progress_bar", interrupted)
        cut = run(*asked)
    (kept,) = (tmp_path / "out").iterdir()
    assert cut.exit_code not in (0, 2)
    assert f"1 of 1 batches are kept in {kept}; the same command goes on there" in cut.stderr
    again = run(*asked)
    assert again.exit_code == 0, again.output
    assert f"going on from {kept}: 1 of 1 batches are done" in again.stderr
    assert not kept.exists()


def test_a_file_of_texts_is_answered_by_a_scheme_for_text(words_only, tmp_path):
    row = {"question": "how many eggs", "answers": ["18"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    result = run("evaluate", tmp_path / "rows.jsonl", "--json")
    assert result.exit_code == 0, result.output
    results = json.loads(result.stdout)
    name = name_of(TEXT)
    assert list(results) == ["16-bit", name]
    assert results[name]["metrics"]["accuracy"]["value"] == 0.0
    told = error_of("evaluate", tmp_path / "rows.jsonl", "--scheme", "duotone")
    assert "has no visual tokens" in told


def test_text_alone_needs_a_scheme_for_text(tiny, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "how many ?", "answers": ["18"]}))
    assert "quantizes visual tokens only" in error_of("evaluate", path, "--scheme", "minmax")
    path.write_text('{"text": "what is this ?"}')
    tiny.processor.tokenizer = LetterTokenizer()
    assert "quantizes text, got 'minmax'" in error_of(
        "evaluate", "perplexity", "--data", path, "--scheme", "minmax"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("captionz",), "did you mean captions"),
        (("made-up",), "made-up samples have no answers"),
        (("written",), "that a model writes itself has no answers"),
        (("gone.jsonl",), "must be an existing file"),
        (("documents", "--split", "test"), "split must be one of"),
        (("perplexity",), "add --data FILE"),
        (("perplexity", "--data", "x.json", "--kl"), "--kl does not go with this task"),
        (("documents", "--context", "9"), "only perplexity cuts text"),
        (("documents", "--data", "x.jsonl"), "only perplexity reads a text from a file"),
        (("gsm8k", "--data", "x.jsonl"), "text benchmarks are run by lm-eval, got 'gsm8k'"),
        (("documents", "--dtype", "int8"), "--dtype must be one of"),
    ],
)
def test_evaluate_names_what_is_wrong(arguments, message):
    assert message in error_of("evaluate", *arguments)


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny.model, "generate", None)
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "--out must be a folder" in error_of("evaluate", "documents", "--out", out)
