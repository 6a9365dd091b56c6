"""Calibrations from embeddings and from a text, of models without placeholders."""

import pytest
import torch

import duotone
from duotone.calibrate import Settings, calibrate, calibration_data, compare, run, write
from duotone.calibrate.moments import CalibrationBatch
from duotone.calibrate.run import check_settings
from duotone.inference.batch import generate, make_cache, prepare
from duotone.inference.encoded import EncodedPrompts, TextFile
from duotone.loading import Loaded
from tiny_text import LetterTokenizer, text_model
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model

from families import inputs as family_inputs
from families import tiny_model as family_model


@pytest.fixture(scope="module")
def words():
    return Loaded("words", text_model(), LetterTokenizer())


def embedded(count, tokens=60, pictures=slice(4, 52)):
    prompts = []
    for seed in range(count):
        draw = torch.Generator().manual_seed(seed)
        mask = torch.zeros(tokens, dtype=torch.bool)
        mask[pictures] = True
        x = 0.4 * torch.randn(tokens, 32, generator=draw)
        prompts.append({"inputs_embeds": x, "visual_mask": mask})
    return EncodedPrompts("embeds", tuple(prompts), 6)


def test_a_text_model_is_calibrated_on_visual_embeddings(words, tmp_path):
    data = calibration_data(words, [embedded(7)], 4, 2, heldout=3)
    assert data.sources[0]["rows"] == ["prompt-0", "prompt-3"]
    file = str(tmp_path / "mine.safetensors")
    bases, spec, report = calibrate(words, data.batches, Settings(bits=1.5), file=file)
    assert spec.visual != "text"
    assert report["header"]["tokens"] == 4 * 48
    assert {row["part"] for row in report["tensors"]} == {"visual", "background"}
    end, _ = compare(words, bases, spec, data.heldout)
    assert end.samples == 3
    assert end.found.packed == pytest.approx(48 / 65, abs=0.02)
    write(bases, spec, tmp_path / "mine")
    batch = prepare(words.model, data.batches[0].tensors)
    cache = make_cache(words.model, spec, batch)
    generate(words.model, batch, cache, 3)
    state = cache.ledger.state
    assert int((state.visual.lengths + state.background.lengths).sum()) == 2 * 48


def test_embeddings_without_visual_tokens_are_a_stream(words):
    data = calibration_data(words, [embedded(2, 200, slice(0, 0))], 2, 2)
    _, spec, _ = calibrate(words, data.batches, Settings(group=32, recent=64))
    assert (spec.visual, spec.recent, spec.text.key.group) == ("text", 64, 32)


def test_groups_of_the_settings_are_the_spans_of_both_passes(words, monkeypatch):
    found = []
    for name in ("gather_moments", "gather_profiles"):
        gather = getattr(run, name)

        def noted(*given, gather=gather):
            found.append(given[-2])
            return gather(*given)

        monkeypatch.setattr(run, name, noted)
    data = calibration_data(words, [embedded(2, 200, slice(0, 0))], 2, 2)
    calibrate(words, data.batches, Settings(group=32, recent=64))
    assert found == [32, 32]


def test_embeddings_give_what_pictures_give(tmp_path):
    """The prompts of a task, encoded by the model and given as embeddings, have its moments."""
    loaded = Loaded("tiny", tiny_model(), TinyProcessor())
    task = calibration_data(loaded, [TINY_TASK], 3, 1)
    prompts = []
    for given in task.batches:
        batch = prepare(loaded.model, given.tensors)
        prompts.append(
            {
                "inputs_embeds": batch.model_inputs["inputs_embeds"][0],
                "visual_mask": batch.visual_mask[0],
            }
        )
    again = EncodedPrompts("tiny", tuple(prompts), TINY_TASK.max_new_tokens)
    data = calibration_data(loaded, [again], 3, 1)
    found, wanted = (calibrate(loaded, each.batches)[0] for each in (data, task))
    torch.testing.assert_close(found.key, wanted.key)
    torch.testing.assert_close(found.value, wanted.value)


def test_embeddings_that_carry_gradients_are_taken(words):
    x = words.model.get_input_embeddings()(torch.arange(60) % 7 + 3)
    assert x.requires_grad
    data = calibration_data(words, [EncodedPrompts("mine", ({"inputs_embeds": x},), 4)], 1)
    assert torch.equal(data.batches[0].tensors["inputs_embeds"][0], x)


def test_a_model_without_placeholders_takes_a_mask():
    model = tiny_model()
    vars(model.config)["image_token_id"] = None  # past the check of its type
    loaded = Loaded("no ids", model, TinyProcessor())
    check_settings(model, Settings())
    x = 0.5 * torch.randn(40, 64, generator=torch.Generator().manual_seed(0))
    prompt = {"inputs_embeds": x, "visual_mask": torch.arange(40) < 32}
    data = calibration_data(loaded, [EncodedPrompts("mine", (prompt,), 4)], 1)
    _, spec, report = calibrate(loaded, data.batches)
    assert isinstance(spec.visual, duotone.KVSpec)
    assert report["header"]["tokens"] == 32


def test_a_text_is_cut_and_held_out(words):
    story = "the cat sat on a mat and then it ran away from all of us. "
    draw = torch.randint(0, 26, (3000,), generator=torch.Generator().manual_seed(0))
    text = TextFile("story", story + "".join(chr(97 + int(i)) for i in draw), context=300)
    data = calibration_data(words, [text], 4, 2, heldout=3)
    assert [len(b.tensors["input_ids"]) for b in data.heldout["story"]] == [2, 1]
    settings = Settings(group=32, recent=64, bits=2.0)
    bases, spec, _ = calibrate(words, data.batches, settings)
    end, _ = compare(words, bases, spec, data.heldout)
    assert end.found.packed > 0.5
    with pytest.raises(ValueError, match="must have at least 30 samples"):
        calibration_data(words, [text], 8, 2, heldout=22)


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen2_5_vl"])
def test_families_that_cannot_read_on_are_compared_token_by_token(family):
    model = family_model(family)
    batches = [
        CalibrationBatch(family_inputs(family, [[3, "image", 4], [1, "image", 5]], seed), 4)
        for seed in (1, 2)
    ]
    loaded = Loaded(family, model, None)
    settings = Settings(bits=2.0, foreground=None)
    bases, spec, _ = calibrate(loaded, batches[:1], settings)
    end, kept = compare(loaded, bases, spec, {"mine": batches[1:]})
    assert end.samples == 2
    assert end.found.kl > 0
    assert 0.1 < end.found.packed < 1
    assert (kept == spec) == (end.kept == "calibrated")
