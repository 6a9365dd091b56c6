"""Models whose `generate` is that of a language model inside."""

import copy
from pathlib import Path

import pytest
import torch
from shrunk import tiny_model_of
from shrunk_pictures import with_picture

import duotone
from duotone import QuantizedCache
from duotone.hf.model.speaker import speaker_of

from families import tiny_model

SPEC = duotone.scheme("duotone-mixed", bits=2)


@pytest.mark.parametrize(
    ("name", "part"), [("blip-2", "language_model"), ("kosmos-2", "text_model")]
)
def test_a_cache_hears_of_the_steps_of_the_part_that_speaks(
    name: str, part: str, tmp_path: Path
) -> None:
    model = tiny_model_of(name)
    assert speaker_of(model) is getattr(model, part)
    given = with_picture(model)
    with duotone.enable(model, SPEC) as session:
        duotone_answer = model.generate(**given, max_new_tokens=4, do_sample=False)
        clone = copy.deepcopy(model)
    state = session.cache.ledger.state
    assert (state.visual.lengths + state.background.lengths).tolist() == [4, 4]
    session.cache.save(tmp_path / "cache.safetensors")
    loaded = QuantizedCache.load(tmp_path / "cache.safetensors", model)
    assert loaded.length == session.cache.length
    loaded.detach()
    # Neither the model nor a copy keeps anything of ours.
    for each in (model, clone):
        own = each.generate(**given, max_new_tokens=4, do_sample=False)
        assert own.shape == duotone_answer.shape
        assert not speaker_of(each)._forward_pre_hooks


def test_embeddings_alone_do_not_tell_where_pictures_are() -> None:
    model = tiny_model_of("blip-2")
    cache = QuantizedCache(model, SPEC)
    with pytest.raises(ValueError, match="positions of visual tokens are unknown"), torch.no_grad():
        model(**with_picture(model), past_key_values=cache)


def test_other_models_speak_themselves() -> None:
    assert speaker_of(tiny_model("llava")) is tiny_model("llava")
