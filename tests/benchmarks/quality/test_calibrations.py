"""Calibrations as rows of the zoo: what the library is given, and what it gives back."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import duotone
from benchmarks.quality import calibrations
from benchmarks.quality.zoo import CALIBRATION, Conversation, measure
from duotone.calibrate import Settings
from training.zoo.batches import Batch
from training.zoo.members import MEMBERS, model_inputs
from training.zoo.train import HELD_OUT, Feed
from training.zoo.vocabulary import ID
from zoo_members import short


def batch_of(name: str, rows: int, seed: int = CALIBRATION) -> Batch:
    return Feed("cpu", seed, 1).next(replace(MEMBERS[name].shapes[0], rows=rows))


@pytest.mark.parametrize("name", ["llava", "qwen2-vl", "qwen3-vl", "gemma3"])
def test_a_prompt_reads_as_its_row_does_up_to_the_last_question(name: str) -> None:
    batch, model = batch_of(name, 3), short(name).build().double().eval()
    batch.pixels = batch.pixels.double()
    given = calibrations.prompts(model, batch).tensors
    ends = [int((row == ID["<assistant>"]).nonzero().max()) for row in batch.ids]
    assert given["attention_mask"].sum(1).tolist() == [end + 1 for end in ends]
    assert len(set(ends)) > 1  # so there is padding
    settings = {"max_new_tokens": 1, "do_sample": False}
    settings |= {"output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        whole = model(**model_inputs(model, batch)).logits[torch.arange(3), ends]
        (asked,) = model.generate(**given, **settings).logits
    torch.testing.assert_close(asked.double(), whole, atol=1e-5, rtol=1e-5)


def test_calibrated_rows_are_read_at_about_a_bit_with_their_parameters(tmp_path: Path) -> None:
    model = short("llava").build().eval()
    rows = calibrations.calibrations(model, batch_of("llava", 2), tmp_path)
    rows |= calibrations.without_data(model, batch_of("llava", 2), tmp_path, rows=4)
    named = ["calibrated@1", "calibrated, whole@1", "calibrated, equal bits@1"]
    assert list(rows) == [*named, "calibrated, made up@1"]
    assert [spec.background is None for spec in rows.values()] == [False, True, False, False]
    talk = Conversation(model, batch_of("llava", 1, HELD_OUT))
    _, *found = measure([talk], rows)
    for row in found:
        assert 0 < row["kl"] < 1
        assert 1 < row["visual_bits"] < 2.2, row
    least = talk.read_by(duotone.scheme("duotone", bits=1), "auto")[1]
    for row in found[2:]:
        assert least - 0.1 < row["visual_bits"] < least + 0.05


@pytest.mark.parametrize("name", ["llava", "qwen2-vl"])
def test_made_up_rows_have_nothing_of_a_batch_but_its_frames(name: str) -> None:
    one, other = (calibrations.made_up(batch_of(name, 3, seed), 7) for seed in (1, 1 + CALIBRATION))
    torch.testing.assert_close(one.pixels, other.pixels, atol=0, rtol=0)
    assert one.pixels.aminmax() == pytest.approx((-1, 1), abs=0.5)
    framed = [torch.isin(each.ids, torch.tensor(calibrations.FRAMES)) for each in (one, other)]
    words = ~framed[0] & ~framed[1]
    assert words.any()
    assert (one.ids == other.ids)[words].all()
    assert (one.ids == ID["<assistant>"]).any(1).all()


def test_a_calibration_that_fails_is_a_row_with_its_reason(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(calibrations, "SETTINGS", {"too narrow": Settings(bits=0.01)})
    model = MEMBERS["llava"].build().eval()
    rows = calibrations.calibrations(model, batch_of("llava", 1), tmp_path)
    _, found = measure([Conversation(model, batch_of("llava", 1, HELD_OUT))], rows)
    assert found["failed"].startswith("ValueError: bits per channel must lie in")
