"""Models that begin a new cache where a conversation passes the length of their short RoPE."""

import pytest
import torch
import transformers
from family_configs import PAD, TEXT
from transformers import Phi3Config, Phi3ForCausalLM, PreTrainedModel

import duotone
from duotone import CacheSpec

from families import inputs, new_model

DENSE, SHORT = CacheSpec(visual="dense", text="dense"), 24
CALL = {"max_new_tokens": 12, "do_sample": False}


def phi3() -> PreTrainedModel:
    """Phi-3, with other frequencies from token 25 on."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    torch.manual_seed(0)
    config = Phi3Config(**TEXT, original_max_position_embeddings=SHORT, rope_parameters=rope)
    model = Phi3ForCausalLM(config).eval()
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, PAD
    return model


FORGETS = pytest.mark.skipif(
    transformers.__version__.startswith("5.17"), reason="Phi-3 forgets the tokens there, too"
)


@pytest.mark.parametrize("tokens", [40, pytest.param(18, marks=FORGETS)])
def test_the_new_cache_is_ours(tokens: int) -> None:
    model, given = phi3(), inputs("llama", [[tokens], [tokens - 7]])
    theirs = model.generate(**given, **CALL)
    with duotone.enable(model, DENSE) as session:
        assert torch.equal(model.generate(**given, **CALL), theirs)
    assert session.cache.length == tokens + CALL["max_new_tokens"] - 1
    assert torch.equal(model.generate(**given, **CALL), theirs)


@pytest.mark.slow
def test_a_model_that_forgets_the_tokens_is_refused() -> None:
    model = new_model("phi4_multimodal")
    model.config.original_max_position_embeddings = SHORT
    with duotone.enable(model, DENSE) as session:
        model.generate(**inputs("phi4_multimodal", [[40]]), **CALL)
        assert session.cache.length == 51
        with pytest.raises(ValueError, match="reads 1 of 25"):
            model.generate(**inputs("phi4_multimodal", [[18]]), **CALL)
