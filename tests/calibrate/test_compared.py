"""The end of a calibration: its spec against presets on samples that it never saw."""

import json

import pytest
import torch

import duotone
from duotone.calibrate import Settings, calibrate, calibration_data, compare, write
from duotone.calibrate.compared import _far_from, presets_near
from duotone.calibrate.lengths import check_lengths
from duotone.hf.model.facts import model_facts
from duotone.loading import Loaded
from duotone.quant import CacheSpec
from duotone.quant.bases import Bases
from duotone.tune.batches import PromptCounts
from tiny_text import LetterTokenizer, text_model
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model


@pytest.fixture(scope="module")
def pictured():
    return Loaded("tiny", tiny_model(), TinyProcessor())


@pytest.fixture(scope="module")
def made(pictured):
    """(bases, spec, data) of a tiny InternVL; its short spans take many true bits."""
    data = calibration_data(pictured, [TINY_TASK], 6, 4, heldout=6)
    bases, spec, _ = calibrate(pictured, data.batches, Settings(bits=1.0), data=data.sources)
    return bases, spec, data


def worse(bases):
    """Bases of which all coefficients are nearly the same: errors grow on the way back."""
    size = bases.key.shape[-1]
    alike = torch.eye(size) + 30 * torch.ones(size, size) / size
    return Bases(bases.key @ alike, bases.value @ alike, header=bases.header)


def rows_of(data):
    return [batch.tensors["pixel_values"] for batch in data]


def test_held_out_samples_are_others(made):
    _, _, data = made
    (kept,) = data.heldout.values()
    seen = {x.numpy().tobytes() for pixels in rows_of(data.batches) for x in pixels}
    held = {x.numpy().tobytes() for pixels in rows_of(kept) for x in pixels}
    assert held
    assert not seen & held
    assert data.sources[0]["heldout"]["samples"] == 6


def test_a_good_calibration_is_kept_and_says_what_it_packs(pictured, made):
    bases, spec, data = made
    steps = []
    end, kept = compare(
        pictured,
        bases,
        spec,
        data.heldout,
        progress=lambda done, total: steps.append((done, total)),
    )
    assert kept == spec
    assert end.kept == end.found.label == "calibrated"
    assert end.rival.bits <= end.found.bits
    assert end.ratio.value < 1
    assert end.samples == 6
    assert 0.3 < end.found.packed < 0.9
    assert steps[-1][0] == steps[-1][1]


def test_the_preset_whose_bits_a_calibration_takes_is_its_rival(pictured, made):
    _, _, data = made
    bases, spec, _ = calibrate(pictured, data.batches)
    end, _ = compare(pictured, bases, spec, data.heldout)
    (preset,) = (one for one in end.others if one.label == "duotone @1")
    assert end.found.bits <= preset.bits <= end.limit
    assert end.rival.kl <= preset.kl


def test_a_preset_takes_the_place_of_a_worse_calibration(pictured, made, tmp_path):
    bases, spec, data = made
    end, kept = compare(pictured, worse(bases), spec, data.heldout)
    assert end.kept == end.rival.label != "calibrated"
    assert kept == duotone.scheme(*end.kept.split(" @")[:1], bits=int(end.kept[-1]))
    files = write(bases, kept, tmp_path / "mine", {"verdict": end.to_dict()}, spec)
    assert [file.name for file in files] == [
        "mine.safetensors", "mine.json", "mine.report.json", "mine.found.json",
    ]  # fmt: skip
    assert CacheSpec.from_file(files[1]) == kept
    assert CacheSpec.from_file(files[3]) == spec
    assert json.loads(files[2].read_text())["verdict"]["better"] == end.kept
    asked, found = compare(pictured, worse(bases), spec, data.heldout, keep_found=True)
    assert (asked.kept, found) == ("calibrated", spec)


def test_presets_far_above_the_bits_are_not_measured(pictured, made):
    facts, counts = model_facts(pictured.model), PromptCounts(24, 12, True)
    few, many = (presets_near(facts, made[1], counts, 6, bits) for bits in (2.5, 9.0))
    assert set(few) < set(many)
    assert "lloyd @4" in many
    assert "lloyd @4" not in few


def test_presets_of_streams_are_planned_with_their_answers(pictured):
    facts, counts = model_facts(pictured.model), PromptCounts(0, 200, all_pictured=False)
    alone, answered = (
        presets_near(facts, duotone.scheme("kivi"), counts, answer, 14.0) for answer in (1, 400)
    )
    assert all(spec.visual == "text" for spec in answered.values())
    assert "kivi @2" in answered
    assert "kivi @2" not in alone


def test_streams_are_taken_with_the_window_of_the_spec_too(pictured):
    """A short window alone may be what makes a calibrated stream small."""
    facts, counts = model_facts(pictured.model), PromptCounts(0, 512, all_pictured=False)
    spec = duotone.scheme("kivi", bits=2).replace(recent=32, sink=4)
    found = presets_near(facts, spec, counts, 64, 8.0)
    assert "kivi @2" not in found
    assert (found["kivi @2, recent 32"].recent, found["kivi @2, recent 32"].sink) == (32, 4)
    long = presets_near(facts, spec.replace(recent=128), counts, 64, 16.0)
    assert "kivi @2" in long
    assert not any("recent" in label for label in long)


def test_a_preset_far_from_16_bit_is_given_up():
    lost = _far_from([-3.0, -3.0, -3.0, -3.0], tasks=2)
    assert lost(1.0, [-1.5]) is None
    assert lost(1.0, [-0.5])
    assert lost(1.0, [-1.9, -1.9])
    assert lost(1.0, [-2.5, -2.5]) is None
    assert lost(1.0, [-1.0, -1.0, -1.0, -1.0]) is None  # measured whole already


def text_data(tmp_path, letters, heldout=2):
    rows, loaded = tmp_path / "rows.jsonl", Loaded("words", text_model(), LetterTokenizer())
    draw = torch.Generator().manual_seed(0)
    texts = torch.randint(97, 123, (6, letters), generator=draw).tolist()
    lines = [json.dumps({"question": "".join(map(chr, t)), "answers": ["x"]}) for t in texts]
    rows.write_text("\n".join(lines))
    task = duotone.tasks.get_task(str(rows))
    return loaded, calibration_data(loaded, [task], 2, 2, heldout=heldout)


def test_a_text_model_is_compared_with_streams(tmp_path):
    loaded, data = text_data(tmp_path, 700)
    settings = Settings(bits=2.0, group=32, recent=128)
    bases, spec, _ = calibrate(loaded, data.batches, settings)
    end, _ = compare(loaded, bases, spec, data.heldout)
    assert 0.7 < end.found.packed < 0.9
    labels = {one.label for one in end.others}
    assert labels
    assert labels <= {f"{n} @{b}" for n in ("kivi", "innerq", "duotone-stream") for b in (1, 2, 4)}


def test_samples_below_the_window_are_refused_before_the_model_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("duotone.calibrate.run.gather_moments", None)
    loaded, data = text_data(tmp_path, 150)
    with pytest.raises(ValueError, match=r"packs nothing below 260 tokens; .* has 214 with its"):
        calibrate(loaded, data.batches, Settings(group=128, recent=128))


def test_the_longest_sample_may_just_be_packed(tmp_path):
    """150 letters and an answer of 64."""
    loaded, data = text_data(tmp_path, 150)
    facts = model_facts(loaded.model)
    check_lengths(loaded.model, data.batches, facts, Settings(group=64, recent=146))
    with pytest.raises(ValueError, match="packs nothing below 215 tokens"):
        check_lengths(loaded.model, data.batches, facts, Settings(group=64, recent=147))


def test_a_spec_that_was_never_packed_is_refused(tmp_path):
    loaded, data = text_data(tmp_path, 150)
    bases, spec, _ = calibrate(loaded, data.batches, Settings(group=32, recent=32))
    with pytest.raises(ValueError, match="no token of its text codes was packed"):
        compare(loaded, bases, spec.replace(recent=300), data.heldout)
