"""Text that a model writes itself: its tokens, its seeds, and calibrations from it."""

import pytest
import torch
import transformers

from duotone.calibrate import Settings, calibrate, calibration_data, compare
from duotone.calibrate.written import TOGETHER, Written, never_written, vocabulary
from duotone.loading import Loaded
from duotone.tasks import get_task
from tiny_text import LetterTokenizer, text_model
from tiny_vlm import TinyProcessor, tiny_model

from families import tiny_model as family_model


class FramedTokenizer(LetterTokenizer):
    """Letters, of which some are special, in a vocabulary with room for two more."""

    bos_token_id = 5
    all_special_ids = (5, 6)

    @property
    def added_tokens_decoder(self):
        special, plain = (
            transformers.AddedToken("x", special=special) for special in (True, False)
        )
        return {7: special, 8: plain}

    def __len__(self):
        return 30


@pytest.fixture(scope="module")
def framed():
    return Loaded("framed", text_model(), FramedTokenizer())


def ids_of(task, loaded, count):
    return torch.stack([prompt["input_ids"] for prompt in task.encoded(loaded, count).prompts])


def test_stretches_begin_with_the_tokenizers_token_and_have_no_other_special_one(framed):
    assert never_written(framed.model, framed.processor) == [5, 6, 7, 30, 31]
    ids = ids_of(Written(64), framed, 12)
    assert ids.shape == (12, 64)
    assert (ids[:, 0] == 5).all()
    written = set(ids[:, 1:].unique().tolist())
    assert not written & {5, 6, 7, 30, 31}
    assert 8 in written
    assert len(written) > 20
    assert len(ids[:, 1].unique()) > 4


def test_fewer_ids_may_be_in_use(framed):
    assert never_written(framed.model, framed.processor, 12) == [5, 6, 7, *range(12, 32)]
    assert int(ids_of(Written(16, tokens=12), framed, 2).max()) < 12


def test_stretches_may_begin_otherwise(framed):
    for begin in ((), (3, 6)):
        ids = ids_of(Written(16, begin=begin), framed, 2)
        assert ids.shape == (2, 16)
        assert ids[:, : len(begin)].tolist() == [list(begin)] * 2
        assert not (ids[:, len(begin) :] == 6).any()


def test_the_same_text_comes_of_the_same_seed_whatever_was_drawn_before(framed):
    torch.manual_seed(3)
    before = torch.get_rng_state()
    few = ids_of(Written(20), framed, 2)
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(5)
    many = ids_of(Written(20), framed, TOGETHER + 1)
    assert torch.equal(many[:2], few)
    assert len(many.unique(dim=0)) == TOGETHER + 1
    assert not torch.equal(ids_of(Written(20, seed=1), framed, 2), few)


def test_text_is_sampled_from_the_models_own_distribution():
    """Settings of a checkpoint that would sharpen it are left out, and so is its end."""
    model = text_model(initializer_range=0.05)
    plain = ids_of(Written(40), Loaded("plain", model, None), 2)
    own = model.generation_config
    own.temperature, own.top_k, own.top_p, own.repetition_penalty = 0.1, 1, 0.1, 2.0
    own.do_sample = False
    assert torch.equal(ids_of(Written(40), Loaded("sharp", model, None), 2), plain)
    own.eos_token_id = int(plain[0, 10])
    ended = ids_of(Written(40), Loaded("ends", model, None), 2)
    assert ended.shape == (2, 40)
    assert not (ended == own.eos_token_id).any()


def test_written_text_is_likelier_than_random_text():
    model = text_model()
    ids = ids_of(Written(60), Loaded("words", model, None), 8)
    random = torch.randint(0, vocabulary(model), ids.shape, generator=torch.Generator())

    @torch.no_grad()
    def loss(x):
        return float(model(input_ids=x, labels=x).loss)

    assert loss(ids) < loss(random) - 0.5


FRAMES = {"gemma3": [290, 292, 293], "qwen2_vl": [290, 291, 292, 293], "llava": [290], "qwen3": []}


@pytest.mark.parametrize("family", FRAMES)
def test_families_write_without_pictures_and_are_calibrated_on_it(family):
    loaded = Loaded(family, family_model(family), None)
    data = calibration_data(loaded, [Written(48)], 3, 2, heldout=2, text=True)
    for batch in data.batches:
        assert not torch.isin(batch.tensors["input_ids"], torch.tensor(FRAMES[family])).any()
    settings = Settings(text=True, group=16, recent=8)
    bases, spec, report = calibrate(loaded, data.batches, settings)
    assert (spec.visual, report["header"]["tokens"]) == ("text", 3 * 48)
    end, _ = compare(loaded, bases, spec, data.heldout)
    assert (end.samples, end.tasks) == (2, ("written",))
    assert end.found.packed > 0.8


def test_no_placeholder_is_written():
    loaded = Loaded("tiny", tiny_model(), TinyProcessor())
    assert never_written(loaded.model, loaded.processor)[:3] == [0, 1, 2]
    assert int(ids_of(Written(32), loaded, 8).min()) > 2


def test_answers_to_written_text_have_no_end(framed):
    """A model that was kept from ending its text would end the answer at once."""
    model = text_model()
    model.lm_head.weight.data[9] = 40 * model.lm_head.weight.data.mean(0)
    own = model.generation_config
    own.eos_token_id = [9, *range(12, 20)]
    loaded = Loaded("ends", model, FramedTokenizer())
    data = calibration_data(loaded, [Written(40)], 2, 2, heldout=2)
    assert data.batches[0].never == (5, 6, 7, 9, *range(12, 20), 30, 31)
    settings = Settings(group=16, recent=8)
    bases, spec, report = calibrate(loaded, data.batches, settings)
    assert report["header"]["queries"] == 2 * (40 + 63)
    end, _ = compare(loaded, bases, spec, data.heldout)
    assert end.found.length == 40 + 63
    assert model.generation_config is own


def test_held_out_stretches_are_other_rows_of_the_same_draw(framed):
    data = calibration_data(framed, [Written(24)], 3, 2, heldout=2)
    (source,) = data.sources
    assert (source["task"], source["samples"], source["rows"]) == (
        "written",
        3,
        ["prompt-0", "prompt-2"],
    )
    assert source["heldout"]["rows"] == (3, 4)
    rows = ids_of(Written(24), framed, 5)
    kept = torch.cat([batch.tensors["input_ids"] for batch in data.heldout["written"]])
    used = torch.cat([batch.tensors["input_ids"] for batch in data.batches])
    assert torch.equal(torch.cat([used, kept]), rows)


def test_no_stretch_is_longer_than_positions_allow():
    loaded = Loaded("short", text_model(max_position_embeddings=100), None)
    assert ids_of(Written(512), loaded, 1).shape == (1, 36)
    shorter = Loaded("shorter", text_model(max_position_embeddings=60), None)
    with pytest.raises(ValueError, match="room after its first 1 tokens, got 1 tokens"):
        Written(512).encoded(shorter, 1)


def test_bad_input_is_refused(framed, monkeypatch):
    with pytest.raises(ValueError, match="context must be >= 1"):
        Written(0)
    with pytest.raises(ValueError, match="samples must be >= 1, got 0"):
        Written().check_samples(0)
    with pytest.raises(ValueError, match="duotone calibrate alone takes these"):
        get_task("written")
    monkeypatch.setattr(FramedTokenizer, "all_special_ids", tuple(range(32)))
    with pytest.raises(ValueError, match="tokens of text to write with, got 32 tokens"):
        Written(16).encoded(framed, 1)


def test_a_model_that_stops_early_is_refused(framed, monkeypatch):
    monkeypatch.setattr(framed.model, "generate", lambda input_ids, **_: input_ids, raising=False)
    with pytest.raises(ValueError, match="must write stretches of 16 tokens, got 2 from 'llama'"):
        Written(16).encoded(framed, 1)


def test_numbers_that_are_none_do_not_end_the_process(framed):
    model = text_model()
    model.lm_head.weight.data.fill_(float("nan"))
    assert ids_of(Written(8), Loaded("broken", model, None), 1).shape == (1, 8)
