"""Sizes of q and k by channel, read from a model's weights for white input of a layer.

They are mean squares after RoPE, which mixes both channels of a rotary pair. No data is needed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duotone.hf.model.attentions import is_readable
from duotone.hf.model.layers import LayerShape
from duotone.weights.modules.fused import Fused
from duotone.weights.modules.quant_linear import QuantLinear

Which = Literal["q", "k"]
# Norms of q and of k, by their names in an attention.
NORMS = {
    "q": ("q_norm", "q_layernorm", "query_layernorm"),
    "k": ("k_norm", "k_layernorm", "key_layernorm"),
}
# Rotation of the language model's channels by a quarter turn, by its names in a model's file.
QUARTER_TURNS = ("rotate_half_llm", "rotate_half_text", "rotate_half")


def mean_squares(
    attention: nn.Module, norm: nn.Module | None, which: Which, shape: LayerShape, share: float
) -> Tensor | None:
    """Mean squares [kv_heads, head_dim] of q or k; None where they are unknown.

    norm: before the attention. share: of a head's channels that RoPE rotates. q has means over the
    query heads of a kv head.
    """
    squares = _before_rope(attention, norm, which, shape)
    if squares is None or squares.is_meta or not bool(squares.isfinite().all()):
        return None
    squares = squares.view(shape.kv_heads, -1, shape.head_dim).mean(1)
    turned = int(shape.head_dim * share)
    sets = _mixed_channels(attention, turned).to(squares.device)
    return torch.cat((squares[:, sets].mean(-1), squares[:, turned:]), -1)


def tensors_of(attention: nn.Module, norm: nn.Module | None) -> Iterator[Tensor]:
    """Yield the tensors that sizes of q and k are of."""
    both = (
        part for which in NORMS for part in (_linear(attention, which), _norm(attention, which))
    )
    for part in (*both, norm):
        for kind in ("_parameters", "_buffers") if part is not None else ():
            yield from (x for x in vars(part)[kind].values() if x is not None)


def child(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """Return the first of a module's children that has one of these names.

    Not by attributes: a module is slow to say that it lacks one.
    """
    known = vars(module)["_modules"]
    return next((x for name in names if (x := known.get(name)) is not None), None)


def _norm(attention: nn.Module, which: Which) -> nn.Module | None:
    return child(attention, NORMS[which])


def _linear(attention: nn.Module, which: Which) -> nn.Module:
    """Return the linear of q or k, without PEFT's adapters around it."""
    linear = child(attention, (f"{which}_proj",))
    return vars(linear)["_modules"].get("base_layer", linear)


def _before_rope(
    attention: nn.Module, norm: nn.Module | None, which: Which, shape: LayerShape
) -> Tensor | None:
    """Mean squares [heads, head_dim] before RoPE; None where they are unknown.

    A norm of q or k divides by a root mean square over its channels, and scales each of them.
    """
    sizes = (shape.q_heads if which == "q" else shape.kv_heads, shape.head_dim)
    squares = _of_product(_linear(attention, which), norm, sizes)
    own = _norm(attention, which)
    if getattr(own, "weight", None) is None:
        return squares
    affine = _affine(own)
    if affine is None or len(affine[0]) not in (shape.head_dim, sizes[0] * sizes[1]):
        return None
    spread, mean = (x.view(-1, shape.head_dim) for x in affine)
    if squares is None:
        squares = torch.ones(sizes, device=spread.device)
    over_heads = own.weight.dim() == 1 and len(spread) > 1
    size = squares.mean() if over_heads else squares.mean(-1, keepdim=True)
    return squares / size.clamp_min(torch.finfo().tiny) * spread.square() + mean.square()


def _of_product(linear: nn.Module, norm: nn.Module | None, sizes: tuple[int, int]) -> Tensor | None:
    """Mean squares, of these sizes, of what a linear makes of white input to a norm."""
    if isinstance(linear, QuantLinear):
        weight = linear.packed.dequantized()
    elif is_readable(getattr(linear, "weight", None)):
        weight = linear.weight
    else:
        return None
    if len(weight) != sizes[0] * sizes[1]:  # it makes gates as well
        return None
    weight, means = weight.float(), torch.zeros(len(weight), device=weight.device)
    affine = None if norm is None else _affine(norm)
    if affine is not None and len(affine[0]) == weight.shape[1]:
        weight, means = weight * affine[0], weight @ affine[1]
    if linear.bias is not None:
        means = means + linear.bias.float()
    return (weight.square().sum(1) + means.square()).view(sizes)


def _affine(norm: nn.Module) -> tuple[Tensor, Tensor] | None:
    """(spreads, means) of a norm's output for white input, flat; None where they are unknown.

    Some norms add 1 to their weight, so the norm itself is asked.
    """
    norm = norm.original if isinstance(norm, Fused) else norm
    weight = getattr(norm, "weight", None)
    if not is_readable(weight):
        return None
    signs = torch.ones_like(weight)
    signs.view(-1)[1::2] = -1
    # Not by a call: hooks of others are for a model's own numbers.
    up, down = (type(norm).forward(norm, x).float().flatten() for x in (signs, -signs))
    return (up - down).abs() / 2, (up + down) / 2


def turned_share(model: PreTrainedModel) -> float:
    """Return the share of a head's channels that RoPE rotates."""
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None)
    return min(share or 1.0, 1.0)


def _mixed_channels(attention: nn.Module, turned: int) -> Tensor:
    """Return the channels [turned, n] that each rotated channel is mixed with, itself included.

    n is 2; where a model's file does not show its pairs, n is 4, for pairs of both conventions.
    """
    own = torch.arange(turned)
    file = sys.modules[type(attention).__module__]
    turn = next((getattr(file, name) for name in QUARTER_TURNS if hasattr(file, name)), None)
    if turn is not None:
        return torch.stack((own, turn(own + 1.0).abs().long() - 1), -1)
    half = turned // 2
    mixed = own[:, None] % half // 2 * 2 + torch.tensor([0, 1, half, half + 1])
    return mixed % turned
