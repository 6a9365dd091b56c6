"""With what power a model's weights read each channel of its keys and values.

A key's channel is read by the query's, a value's by the output projection. Their mean squares under
white input need no data: the rows of W_q times the input norm's weights, the columns of W_o. They
order the channels of a spec with `read_power`; a model whose projections are fused or packed gives
none, says so once, and its channels are ordered by their own variances alone.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

from duotone.cache import ReadPower
from duotone.hf.facts import ModelFacts, rotary_pairs

logger = logging.get_logger(__name__)


def read_powers(model: PreTrainedModel, facts: ModelFacts) -> list[ReadPower]:
    """One entry per layer; empty entries where the weights cannot be read."""
    blocks = {
        block.self_attn.layer_idx: block
        for block in model.modules()
        if getattr(getattr(block, "self_attn", None), "layer_idx", None) is not None
    }
    usable = sorted(blocks) == list(range(facts.layers))
    if not usable or not all(_is_readable(b.self_attn, facts) for b in blocks.values()):
        logger.warning_once(
            f"{type(model).__name__} has no plain q_proj and o_proj in every layer: channels of "
            "unequal bits are ordered by their variances alone, which costs some accuracy."
        )
        return [ReadPower()] * facts.layers
    pairs = rotary_pairs(model.config, facts.head_dim)
    with torch.no_grad():
        return [_of_block(blocks[i], facts, pairs) for i in range(facts.layers)]


def _is_readable(attention: nn.Module, facts: ModelFacts) -> bool:
    width = facts.q_heads * facts.head_dim
    shapes = (("q_proj", 0), ("o_proj", 1))
    weights = [(getattr(getattr(attention, n, None), "weight", None), axis) for n, axis in shapes]
    return all(
        isinstance(w, Tensor)
        and w.dim() == 2
        and w.is_floating_point()
        and not w.is_meta
        and w.shape[axis] == width
        for w, axis in weights
    )


def _of_block(block: nn.Module, facts: ModelFacts, pairs: Tensor) -> ReadPower:
    attention = block.self_attn
    heads = (facts.kv_heads, facts.q_heads // facts.kv_heads, facts.head_dim)
    query = _query_power(attention, getattr(block, "input_layernorm", None)).view(heads).sum(1)
    output = attention.o_proj.weight.float().square().sum(0).view(heads).sum(1)
    # RoPE turns the two channels of a pair into each other: over positions both are read alike.
    mixed = (query + query[:, pairs.to(query.device)]) / 2
    return ReadPower(mixed, output)


def _query_power(attention: nn.Module, norm: nn.Module | None) -> Float[Tensor, " q_channels"]:
    """E[q_c^2] up to a constant, before RoPE, for white input of the block."""
    weight = attention.q_proj.weight.float()
    power = weight.square()
    if norm is not None:
        power = power * _gain_squared(norm, weight.shape[1])
    power = power.sum(1)
    if attention.q_proj.bias is not None:
        power = power + attention.q_proj.bias.float().square()
    query_norm = getattr(attention, "q_norm", None)
    if query_norm is None:
        return power
    size = query_norm.weight.shape[0]
    heads = power.unflatten(-1, (-1, size))
    return (heads / heads.mean(-1, keepdim=True) * _gain_squared(query_norm, size)).flatten()


def _gain_squared(norm: nn.Module, size: int) -> Float[Tensor, " channels"]:
    """Squared weights of a norm, by what it makes of +1, -1, ...: families differ in 1 + w or w."""
    weight = norm.weight
    probe = torch.ones(size, device=weight.device, dtype=weight.dtype)
    probe[1::2] = -1
    return norm(probe[None])[0].float().square()
