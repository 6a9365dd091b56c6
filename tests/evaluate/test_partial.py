"""Evaluations that are interrupted and go on, against ones that are not."""

import json
import re

import pytest

import duotone
from duotone.evaluate import evaluate, evaluate_perplexity, loop
from duotone.tasks import Passages
from duotone.tools import tensor_file
from tiny_text import text_model
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model

SCHEMES = ["calibquant-paper"]
SAMPLES, BATCH = 6, 2
PASSAGES = Passages([[[3, 4, 5, 6, 7]], [[4, 3, 4]], [[5, 6]], [[3, 3, 7, 7]]], 8, "x")


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def words():
    return text_model()


def answered(model, out, schemes=SCHEMES, **settings):
    given = {"batch_size": BATCH, "workers": 0, "kl": True} | settings
    return evaluate(model, TinyProcessor(), TINY_TASK, schemes, SAMPLES, out=out, **given)


def read(model, out, schemes=("kivi",), **settings):
    specs = {name: duotone.scheme(name).replace(recent=0) for name in schemes}
    given = {"batch_size": 2} | settings
    return evaluate_perplexity(model, PASSAGES, specs, out=out, **given)


def at(stop):
    """Progress that interrupts after so many samples."""

    def progress(done, total):
        if done >= stop:
            raise KeyboardInterrupt

    return progress


def interrupted(run, *given, stop=BATCH, **settings):
    """The notes of a run that ends after `stop` samples."""
    with pytest.raises(KeyboardInterrupt) as caught:
        run(*given, progress=at(stop), **settings)
    return caught.value.__notes__


def timeless(folder):
    """All files, without what differs from run to run."""
    files = {}
    for path in sorted(folder.iterdir()):
        lines = path.read_text()
        if path.suffix == ".json":
            lines = json.loads(lines) | {"created": "", "seconds": 0}
        files[path.name] = lines
    return files


@pytest.fixture(scope="module")
def whole(model, tmp_path_factory):
    """(the evaluation, its files) of a run in one go."""
    folder = tmp_path_factory.mktemp("whole")
    return answered(model, folder), timeless(folder)


def test_it_ends_as_if_it_had_not_been_interrupted(model, whole, tmp_path):
    notes = interrupted(answered, model, tmp_path, stop=4)
    (kept,) = tmp_path.iterdir()
    end = f"2 of 3 batches are kept in {kept}; the same command goes on there"
    assert notes == [f"interrupted: {end}"]
    said, seen = [], []
    progress = {"progress": lambda done, _: seen.append(done)}
    again = answered(model, tmp_path, say=said.append, **progress)
    assert seen == [6]
    assert said == [f"going on from {kept}: 2 of 3 batches are done"]
    assert (timeless(tmp_path), again.answers) == (whole[1], whole[0].answers)


@pytest.mark.parametrize("stop", [2, 4])
def test_perplexity_goes_on_too(stop, words, tmp_path):
    read(words, tmp_path / "whole")
    interrupted(read, words, tmp_path / "cut", stop=stop)
    assert len(list((tmp_path / "cut").iterdir())) == 1
    read(words, tmp_path / "cut")
    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")


def test_finished_batches_are_not_read_again(words, tmp_path, monkeypatch):
    interrupted(read, words, tmp_path, stop=4)
    monkeypatch.setattr("duotone.evaluate.perplexity.token_losses", None)
    assert set(read(words, tmp_path).results) == {"16-bit", "kivi"}


def test_an_interrupt_while_results_are_written_loses_none(model, whole, tmp_path, monkeypatch):
    own = loop.write_result

    def second_fails(out, result, rows):
        if list(out.glob("*.json")):
            raise KeyboardInterrupt
        own(out, result, rows)

    monkeypatch.setattr(loop, "write_result", second_fails)
    with pytest.raises(KeyboardInterrupt):
        answered(model, tmp_path)
    monkeypatch.setattr(loop, "write_result", own)
    monkeypatch.setattr(loop, "prepare", None)
    answered(model, tmp_path)
    assert timeless(tmp_path) == whole[1]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


CHANGES = {
    "schemes": {"schemes": ("kivi", "asymkv")},
    "seed": {"seed": 1},
    "batch size": {"batch_size": 1},
    "weights": {"model": text_model(seed=1)},
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_settings_begin_anew_and_say_so(name, words, tmp_path):
    interrupted(read, words, tmp_path)
    (kept,) = tmp_path.iterdir()
    said, before = [], contents(kept)
    read(**{"model": words, "out": tmp_path, "say": said.append} | CHANGES[name])
    assert said == [
        f"beginning anew: {kept} is of other schemes, settings, weights or versions. "
        "Give what it began with to go on with it, or remove it"
    ]
    assert contents(kept) == before
    assert list(tmp_path.glob("*.partial")) == [kept]


def test_a_dirty_tree_is_the_same_run_and_another_version_is_not(words, tmp_path, monkeypatch):
    """The first result in a repository makes its tree dirty."""
    monkeypatch.setenv("DUOTONE_COMMIT", "abc")
    interrupted(read, words, tmp_path)
    said = []
    for commit in ("abc+dirty", "abd"):
        monkeypatch.setenv("DUOTONE_COMMIT", commit)
        interrupted(read, words, tmp_path, say=said.append)
    assert [line.split()[0] for line in said] == ["going", "beginning"]


def test_batches_after_a_missing_one_count_for_nothing(words, tmp_path):
    read(words, tmp_path / "whole")
    interrupted(read, words, tmp_path / "cut", stop=4)
    (kept,) = (tmp_path / "cut").iterdir()
    (kept / "batch-0001.safetensors").unlink()
    read(words, tmp_path / "cut")
    assert timeless(tmp_path / "cut") == timeless(tmp_path / "whole")


def without_its_scheme(kept):
    """The first batch of a run of another scheme."""
    data, _ = tensor_file.read(first := kept / "batch-0001.safetensors", "batch", "a batch")
    tensor_file.write(first, {}, {"16-bit": data["16-bit"], "kiwi": data["kivi"]}, "batch")


def with_another_number(kept):
    """With one digit of a result changed, where no checksum stands."""
    path = kept / "batch-0001.safetensors"
    data = path.read_bytes()
    at = next(i for i in range(data.index(b".") + 1, len(data)) if data[i : i + 1].isdigit())
    digit = str((int(data[at : at + 1]) + 1) % 10).encode()
    path.write_bytes(data[:at] + digit + data[at + 1 :])


SPOILED = {
    "another identity": (lambda kept: (kept / "identity.json").write_text("{}"), "differs in co"),
    "no identity": (lambda kept: (kept / "identity.json").unlink(), "must come from an interr"),
    "no JSON": (lambda kept: (kept / "identity.json").write_text("half of"), "JSON is needed"),
    "no scheme": (without_its_scheme, "no batches of 'kivi'"),
    "another number": (with_another_number, "checksum is not that of its content"),
    "cut off": (
        lambda kept: (kept / "batch-0001.safetensors").write_bytes(b"half of"),
        "batch-0001.safetensors cannot be gone on with",
    ),
}


@pytest.mark.parametrize("name", SPOILED)
def test_folders_of_something_else_are_refused_and_kept(name, words, tmp_path):
    spoil, message = SPOILED[name]
    interrupted(read, words, tmp_path)
    (kept,) = tmp_path.iterdir()
    spoil(kept)
    before = contents(kept)
    with pytest.raises(ValueError, match=message) as caught:
        read(words, tmp_path)
    assert re.search("[Rr]emove (it|the folder) to (begin|do it) again", str(caught.value))
    assert contents(kept) == before


def test_without_a_folder_the_loss_is_said(words):
    (note,) = interrupted(read, words, None)
    assert "1 finished batch lost; with --out FOLDER" in note


def test_before_the_first_batch_nothing_is_kept(words, tmp_path, monkeypatch):
    def at_once(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("duotone.evaluate.perplexity.token_losses", at_once)
    with pytest.raises(KeyboardInterrupt) as caught:
        read(words, tmp_path)
    assert "nothing is kept yet" in caught.value.__notes__[0]
    assert not list(tmp_path.iterdir())


def test_running_out_of_time_can_go_on(model, tmp_path):
    short = answered(model, tmp_path, minutes=0.0, batch_size=4)
    assert short.results["16-bit"]["samples"] == 4
    seen = []
    more = answered(model, tmp_path, batch_size=4, progress=lambda done, _: seen.append(done))
    assert seen == [6]
    assert more.results["16-bit"]["complete"]
    assert not list(tmp_path.glob("*.partial"))
