"""Calibrations that are interrupted and go on, against one that is not."""

from dataclasses import replace
from shutil import rmtree

import pytest
import safetensors.torch
import torch

from duotone import resume
from duotone.calibrate import (
    Settings,
    calibrate,
    calibration_data,
    check_files,
    moments,
    partial_of,
    sums,
    write,
)
from duotone.calibrate.run import learn
from duotone.loading import Loaded
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model

SETTINGS = Settings(bits=1.5)
BATCHES = 3
FILE = "sums-0001.safetensors"


@pytest.fixture(scope="module")
def pictured():
    return Loaded("tiny", tiny_model(), TinyProcessor())


@pytest.fixture(scope="module")
def batches(pictured):
    return calibration_data(pictured, [TINY_TASK], 2 * BATCHES, 2).batches


@pytest.fixture(scope="module")
def whole(pictured, batches):
    return calibrate(pictured, batches, SETTINGS)


@pytest.fixture
def every_batch(monkeypatch):
    monkeypatch.setattr(resume, "PAUSE", 0.0)


@pytest.fixture
def left(pictured, batches, tmp_path, every_batch):
    """The partial folder of a run that ended in its second batch."""
    until(2, pictured, batches, path := partial_of(tmp_path / "mine"))
    return path


def until(stop, loaded, batches, path, **options):
    """Calibrate until so many batches of both passes are done; the numbers that were reported."""
    seen = []

    def progress(done, total):
        assert total == 2 * BATCHES
        seen.append(done)
        if done == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        calibrate(loaded, batches, SETTINGS, partial=path, progress=progress, **options)
    return seen


def assert_same(made, expected):
    """Bit by bit, but for the time."""
    (bases, spec, report), (others, other, wanted) = made, expected
    assert torch.equal(bases.key, others.key)
    assert torch.equal(bases.value, others.value)
    assert spec == other
    assert report["tensors"] == wanted["tensors"]
    assert report["header"] | {"created": ""} == wanted["header"] | {"created": ""}


@pytest.mark.parametrize("stop", range(1, 2 * BATCHES + 1))
def test_it_goes_on_at_the_batch_that_it_reached(
    stop, pictured, batches, whole, tmp_path, every_batch
):
    path, said, seen = tmp_path / "mine.partial", [], []
    assert until(stop, pictured, batches, path) == list(range(1, stop + 1))
    options = {"progress": lambda done, _: seen.append(done), "say": said.append}
    made = calibrate(pictured, batches, SETTINGS, partial=path, **options)
    assert seen == list(range(stop + 1, 2 * BATCHES + 1))
    assert said == [f"going on from {path}: {stop} of {2 * BATCHES} batches are done"]
    assert_same(made, whole)


def test_it_can_be_interrupted_again_and_again(pictured, batches, whole, tmp_path, every_batch):
    path = tmp_path / "mine.partial"
    for stop in (1, 2, 4, 5):
        assert until(stop, pictured, batches, path)[-1] == stop
    assert_same(calibrate(pictured, batches, SETTINGS, partial=path), whole)


def test_all_that_is_learned_comes_back(pictured, batches, tmp_path, every_batch):
    """Of the second pass, too, what specs do not need: the foreground's share of energy."""
    path = tmp_path / "mine.partial"
    whole = learn(pictured, batches, SETTINGS)
    assert all(0 < share < 1 for share in whole.foreground.values())
    until(BATCHES + 2, pictured, batches, path)
    seen = []
    counted = {"progress": lambda done, _: seen.append(done)}
    made = learn(pictured, batches, SETTINGS, partial=path, **counted)
    assert seen == [2 * BATCHES]
    assert made.foreground == whole.foreground
    assert made.shares == whole.shares
    assert made.spectra.keys() == whole.spectra.keys()
    assert all(torch.equal(made.spectra[name], of) for name, of in whole.spectra.items())
    for one, other in zip(made.moments, whole.moments, strict=True):
        assert all(torch.equal(getattr(one, n), getattr(other, n)) for n in sums.MATRICES)


def test_a_batch_that_was_cut_off_counts_for_nothing(left, pictured, batches, whole, monkeypatch):
    """Interrupted when two of three layers have seen the third batch."""
    own, calls = moments.query_sums, []

    def cut(*given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return own(*given)

    with monkeypatch.context() as patched:
        patched.setattr(moments, "query_sums", cut)
        with pytest.raises(KeyboardInterrupt):
            calibrate(pictured, batches, SETTINGS, partial=left)
    assert_same(calibrate(pictured, batches, SETTINGS, partial=left), whole)


def test_a_write_that_was_cut_off_leaves_the_last_one(left, pictured, batches, whole, monkeypatch):
    def cut(tensors, file, metadata):
        file.write_bytes(b"half of")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(safetensors.torch, "save_file", cut)
        with pytest.raises(KeyboardInterrupt):
            calibrate(pictured, batches, SETTINGS, partial=left)
    made = calibrate(pictured, batches, SETTINGS, partial=left)
    assert_same(made, whole)
    write(*made[:2], left.with_name("mine"))
    assert sorted(path.name for path in left.parent.iterdir()) == ["mine.json", "mine.safetensors"]


def note_of(stop, *given):
    """What an interrupt behind so many batches says."""

    def progress(done, _):
        if done == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        calibrate(*given[:2], SETTINGS, partial=given[2], progress=progress)
    return caught.value.__notes__[0]


def test_large_sums_are_written_now_and_then_and_after_each_pass(
    pictured, batches, tmp_path, monkeypatch
):
    """The first batch always; then a write that took long is not soon followed by another."""
    monkeypatch.setattr(resume, "PAUSE", 1e9)
    given = (pictured, batches, tmp_path / "mine.partial")
    end = f"kept in {given[2]}; the same command goes on there"
    lost = end.replace(";", ", later ones (1) are lost;")
    assert note_of(1, *given) == f"interrupted: 1 of 6 batches are {end}"
    rmtree(given[2])
    assert note_of(2, *given) == f"interrupted: 1 of 6 batches are {lost}"
    rmtree(given[2])
    assert note_of(BATCHES, *given) == f"interrupted: 3 of 6 batches are {end}"


def test_an_interrupt_before_the_first_batch_is_done_says_so(
    pictured, batches, tmp_path, monkeypatch
):
    def cut(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(moments, "query_sums", cut)
    with pytest.raises(KeyboardInterrupt) as caught:
        calibrate(pictured, batches, SETTINGS, partial=tmp_path / "mine.partial")
    assert "nothing is kept yet" in caught.value.__notes__[0]
    assert not list(tmp_path.iterdir())


def test_the_file_does_not_grow_with_the_batches(left, pictured, batches):
    def shapes():
        return {name: x.shape for name, x in safetensors.torch.load_file(left / FILE).items()}

    before = shapes()
    until(BATCHES, pictured, batches, left)
    assert shapes() == before


def test_other_bits_are_divided_from_the_same_sums(left, pictured, batches):
    settings = replace(SETTINGS, bits=2.0, key_weight=1.0)
    made = calibrate(pictured, batches, settings, partial=left)
    assert_same(made, calibrate(pictured, batches, settings))


def other_weights():
    model = tiny_model()
    model.get_decoder().layers[2].mlp.down_proj.weight.data += 1e-3
    return Loaded("tiny", model, TinyProcessor())


REFUSED = {
    "foreground": (Settings(foreground=0.3), slice(None), r"foreground: 0\.45 -> 0\.3"),
    "mix": (Settings(mix=0.1), slice(None), r"mix: 0\.0 -> 0\.1"),
    "fewer batches": (SETTINGS, slice(2), "batches: '"),
    "another order": (SETTINGS, slice(None, None, -1), "batches: '"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_changes_the_sums_is_refused(name, left, pictured, batches):
    settings, chosen, message = REFUSED[name]
    with pytest.raises(ValueError, match=rf"goes on with the identity it began with.*{message}"):
        calibrate(pictured, batches[chosen], settings, partial=left)


def test_other_weights_of_the_same_model_are_refused(left, batches):
    with pytest.raises(ValueError, match=r"differs in weights: '\w+' -> '\w+'\. Give"):
        calibrate(other_weights(), batches, SETTINGS, partial=left)


SPOILED = {
    "cut off": (lambda left: (left / FILE).write_bytes(b"half of"), "it to do it again"),
    "no identity": (lambda left: (left / "identity.json").unlink(), "Remove it to begin again"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_damaged_folders_are_refused(name, left, pictured, batches):
    spoil, message = SPOILED[name]
    spoil(left)
    for use in (
        lambda: calibrate(pictured, batches, SETTINGS, partial=left),
        lambda: check_files(left.with_name("mine")),
    ):
        with pytest.raises(ValueError, match=message):
            use()


def test_files_of_earlier_versions_are_refused(tmp_path):
    path = partial_of(tmp_path / "mine.safetensors")
    assert path == partial_of(tmp_path / "mine")
    former = tmp_path / "mine.partial.safetensors"
    safetensors.torch.save_file({"key": torch.ones(1)}, former)
    with pytest.raises(ValueError, match=r"kept its sums in one file.* Remove it to begin again"):
        check_files(tmp_path / "mine")


class FakeClock:
    """Seconds that a test lets pass."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(("took", "pause"), [(0.01, 0.2), (0.005, 0.1), (3.0, 60.0)])
def test_quick_writes_are_soon_repeated(took, pause, monkeypatch):
    monkeypatch.setattr(resume, "monotonic", clock := FakeClock())
    pace = resume.Pace()
    assert pace.is_due()
    with pace.write():
        clock.now += took
    clock.now += 0.99 * pause
    assert not pace.is_due()
    clock.now += 0.02 * pause
    assert pace.is_due()


def test_waiting_for_the_device_is_no_time_of_writing(pictured, batches, tmp_path, monkeypatch):
    """An hour of computing before the sums are there, and a write of 5 ms: no batch is lost."""
    monkeypatch.setattr(resume, "monotonic", clock := FakeClock())
    own, write = sums.Sums.tensors, resume.tensor_file.write

    def computed(of):
        clock.now += 3600.0
        return own(of)

    def written(*given):
        clock.now += 0.005
        return write(*given)

    monkeypatch.setattr(sums.Sums, "tensors", computed)
    monkeypatch.setattr(resume.tensor_file, "write", written)

    def progress(done, _):
        clock.now += 1.0
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        calibrate(pictured, batches, SETTINGS, partial=tmp_path / "mine.partial", progress=progress)
    assert "interrupted: 2 of 6 batches are kept" in caught.value.__notes__[0]
