"""Visual rows of a step that is a single token, an embedding, or a copy's."""

import copy

import pytest
import torch
from transformers import AutoModelForImageTextToText, DynamicCache, StaticCache

from duotone.hf.weights.modality import VisualRows, announced
from duotone.weights.modules.modality import Modality

from families import FAMILIES, IMAGE

PICTURE = torch.ones(1, 3, 8, 8)


@pytest.fixture(scope="module")
def model():
    """One visual token per picture."""
    config = FAMILIES["internvl"].config()
    config.vision_config.image_size = [8, 8]
    config.image_seq_length = 1
    made = AutoModelForImageTextToText.from_config(config).eval()
    VisualRows.attach(made, Modality())
    return made


def seen(model, **given):
    """Rows that the language model's linears are told to be visual."""
    found = []
    modality = VisualRows.of(model).modality
    hook = model.get_decoder().register_forward_pre_hook(lambda *_: found.append(modality.visual))
    try:
        with torch.no_grad():
            model(**given)
    finally:
        hook.remove()
    assert modality.visual is None
    return None if found[0] is None else found[0].tolist()


def caches(model):
    text = model.config.get_text_config()
    return [None, DynamicCache(), StaticCache(config=text, max_cache_len=8)]


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["no cache", "dynamic", "static"])
def test_a_chunk_of_one_visual_token_is_visual(model, kind):
    ids, cache = torch.tensor([[IMAGE]]), caches(model)[kind]
    assert seen(model, input_ids=ids, pixel_values=PICTURE, past_key_values=cache) == [True]


def test_a_placeholder_that_the_model_wrote_is_text(model):
    cache = DynamicCache()
    prompt = torch.tensor([[3, IMAGE, 4]])
    told = seen(model, input_ids=prompt, pixel_values=PICTURE, past_key_values=cache)
    assert told == [False, True, False]
    assert seen(model, input_ids=torch.tensor([[IMAGE]]), past_key_values=cache) is None


def test_one_announced_embedding_is_what_the_mask_says(model):
    embeds, cache = torch.randn(1, 1, 64), DynamicCache()
    with announced(model, torch.tensor([[True, False, True]])):
        told = [seen(model, inputs_embeds=embeds, past_key_values=cache) for _ in range(4)]
    assert told == [[True], [False], [True], [False]]
    assert seen(model, inputs_embeds=embeds, past_key_values=cache) is None


def test_a_deep_copy_is_told_apart_from_its_original(model):
    copied, embeds = copy.deepcopy(model), torch.randn(1, 3, 64)
    with announced(copied, torch.tensor([[False, True, False]])):
        assert seen(copied, inputs_embeds=embeds) == [False, True, False]
        with pytest.raises(ValueError, match="must know its visual tokens"):
            seen(model, inputs_embeds=embeds)
