"""A text model whose caller marks some of its embeddings as visual."""

import pytest
import torch

import duotone
from duotone.hf import QuantizedCache
from tiny_text import text_model

TOKENS, VISUAL = 60, slice(5, 50)


@pytest.fixture(scope="module")
def model():
    return text_model().double()


def given(model):
    ids = torch.randint(0, 32, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    embeds = model.get_input_embeddings()(ids).detach()
    mask = torch.zeros(2, TOKENS, dtype=torch.bool)
    mask[:, VISUAL] = True
    return {"inputs_embeds": embeds, "attention_mask": torch.ones(2, TOKENS)}, mask


def answer(model, inputs, **options):
    return model.generate(
        **inputs, max_new_tokens=12, do_sample=False, pad_token_id=0,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("scheme", ["duotone", "duotone-whole", "calibquant"])
def test_enable_packs_what_the_mask_marks(model, scheme):
    inputs, mask = given(model)
    spec = duotone.scheme(scheme)
    plain = answer(model, inputs)
    with duotone.enable(model, spec, visual_mask=mask) as session:
        enabled = answer(model, inputs)
        state = session.cache.ledger.state
    assert (state.visual.lengths + state.background.lengths).tolist() == [45, 45]
    cache = QuantizedCache(model, spec, visual_mask=mask)
    by_cache = answer(model, inputs, past_key_values=cache)
    torch.testing.assert_close(torch.stack(enabled.logits), torch.stack(by_cache.logits))
    assert not torch.allclose(enabled.logits[1], plain.logits[1])


def test_without_marks_schemes_of_pictures_are_refused(model):
    for mask in (None, torch.zeros(2, TOKENS, dtype=torch.bool)):
        refused = pytest.raises(ValueError, match="quantizes visual tokens only")
        with refused, duotone.enable(model, duotone.scheme("duotone"), visual_mask=mask):
            pass
