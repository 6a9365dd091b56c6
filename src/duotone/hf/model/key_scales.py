"""Units in which queries see keys, read from a model's weights.

A score q . k is (q / w) . (k * w) for any w per channel. With w the size of q, errors of k * w
count alike in all channels. Then a quantizer that compares channels gives bits to those that
matter. w is a root mean square of q for white input of the layer. The mean is over the query heads
of a kv head, and over both channels of a rotary pair, which RoPE mixes. No data is needed, and a
poor w costs quality alone.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duotone.hf.model.attentions import is_readable
from duotone.hf.model.facts import ModelFacts
from duotone.hf.model.layers import LayerShape
from duotone.quant import CacheSpec, KVSpec, TensorSpec
from duotone.quant.bases import Reference
from duotone.weights.modules.fused import Fused
from duotone.weights.modules.quant_linear import QuantLinear

# Keys stay as they are in layers whose largest w of a head is at most so many times the smallest.
FAR = 4.0
# The smallest w; the largest of every head is 1, so no key and no query overflows.
LEAST = 2.0**-8
# Norms whose output a layer's attention reads, by their names in the layer.
NORMS_BEFORE = ("input_layernorm", "operator_norm", "norm")
# Norms of q, by their names in an attention.
NORMS_OF_QUERIES = ("q_norm", "q_layernorm", "query_layernorm")
# Rotation of the language model's channels by a quarter turn, by its names in a model's file.
QUARTER_TURNS = ("rotate_half_llm", "rotate_half_text", "rotate_half")
# Of each model whose weights were read: their state then, and {number of a layer: w}.
_FOUND: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, dict[int, Tensor]]]
_FOUND = weakref.WeakKeyDictionary()


def key_scales(model: PreTrainedModel, facts: ModelFacts, spec: CacheSpec) -> list[Tensor | None]:
    """Return w [kv_heads, 1, head_dim] of every packed layer; None where keys stay as they are.

    Keys stay where `spec` says so or compares no channels of K, and where w is nearly equal. They
    also stay where bases or shared codes belong to keys as they are, or weights cannot be read.
    """
    places = [place for place in range(facts.layers) if _is_wanted(spec, place)]
    found: list[Tensor | None] = [None] * facts.layers
    if places and not facts.has_latents:
        known = _far_scales(model, facts)
        for place in places:
            found[place] = known.get(facts.packed[place])
    return found


def _is_wanted(spec: CacheSpec, layer: int) -> bool:
    if spec.scale_keys == "never" or spec.share is not None:
        return False
    own = spec.at_layer(layer)
    policies = (own.visual, own.background, own.text)
    keys = [each.key for each in policies if isinstance(each, KVSpec)]
    if any(Reference.parse(key.transform or "") for key in keys):
        return False
    return own.background is not None or any(map(_compares_channels, keys))


def _compares_channels(key: TensorSpec) -> bool:
    """False for a range per channel: its codes are the same for keys of any scale."""
    return bool(
        key.along != "tokens" or key.classes or key.energy or key.transform or key.gain == "fit"
    )


@torch.inference_mode(False)  # w is kept, for steps with gradients as well
@torch.no_grad()
def _far_scales(model: PreTrainedModel, facts: ModelFacts) -> dict[int, Tensor]:
    """{number of a layer: w} of the layers where it is far from equal; weights are read once."""
    layers = list(_layers(model, facts))
    state = [_state(attention, norm) for attention, norm in layers]
    known = _FOUND.get(model)
    if known is None or known[0] != state:
        shapes = dict(zip(facts.packed, facts.shapes, strict=True))
        share = _turned_share(model)
        made = ((a.layer_idx, _scales(a, norm, shapes[a.layer_idx], share)) for a, norm in layers)
        far = {number: w.to(model.dtype) for number, w in made if w is not None and _is_far(w)}
        known = _FOUND[model] = (state, far)
    return known[1]


def _is_far(scales: Tensor) -> bool:
    return float((scales.amax(-1) / scales.amin(-1)).max()) > FAR


def _layers(
    model: PreTrainedModel, facts: ModelFacts
) -> Iterator[tuple[nn.Module, nn.Module | None]]:
    """Yield the attention of each packed layer with the norm before it."""
    packed = frozenset(facts.packed)
    for layer in model.get_decoder().modules():
        # Not by attributes: a module is slow to say that it lacks one, and this is every cache's.
        children = (child for child in vars(layer)["_modules"].values() if child is not None)
        for child in children:
            has_keys = "k_proj" in vars(child)["_modules"]
            if has_keys and getattr(child, "layer_idx", None) in packed:
                yield child, _child(layer, NORMS_BEFORE)


def _child(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """Return the first of a module's children that has one of these names."""
    known = vars(module)["_modules"]
    return next((x for name in names if (x := known.get(name)) is not None), None)


def _state(attention: nn.Module, norm: nn.Module | None) -> list[Any]:
    """Addresses of the tensors that w is of, and changes so far, without those through `.data`.

    Inference tensors count none.
    """
    parts = (_base(attention.q_proj), _child(attention, NORMS_OF_QUERIES), norm)
    parts = [vars(part) for part in parts if part is not None]
    kept = [part[kind] for part in parts for kind in ("_parameters", "_buffers")]
    tensors = [x for each in kept for x in each.values() if x is not None]
    return [(x.data_ptr(), None if x.is_inference() else x._version, x.dtype) for x in tensors]


def _scales(
    attention: nn.Module, norm: nn.Module | None, shape: LayerShape, share: float
) -> Tensor | None:
    """Return w of one layer, the largest of a head 1; None where it is unknown."""
    squares = _query_squares(attention, norm, shape)
    if squares is None or not bool(squares.isfinite().all()):
        return None
    squares = squares.view(shape.kv_heads, -1, shape.head_dim).mean(1)
    turned = int(shape.head_dim * share)
    sets = _mixed_channels(attention, turned).to(squares.device)
    squares = torch.cat((squares[:, sets].mean(-1), squares[:, turned:]), -1)
    scales = squares.sqrt()
    largest = scales.amax(-1, keepdim=True)
    return torch.where(largest > 0, scales / largest, 1.0).clamp_min(LEAST)[:, None]


def _query_squares(
    attention: nn.Module, norm: nn.Module | None, shape: LayerShape
) -> Tensor | None:
    """Mean squares [q_heads, head_dim] of q before RoPE for white input; None: unknown.

    A norm of q divides by a root mean square over its channels, and scales each of them.
    """
    sizes = (shape.q_heads, shape.head_dim)
    squares = _product_squares(attention, norm, sizes)
    of_queries = _child(attention, NORMS_OF_QUERIES)
    if getattr(of_queries, "weight", None) is None:
        return squares
    affine = _affine(of_queries)
    if affine is None or len(affine[0]) not in (shape.head_dim, sizes[0] * sizes[1]):
        return None
    spread, mean = (x.view(-1, shape.head_dim) for x in affine)
    if squares is None:
        squares = torch.ones(sizes, device=spread.device)
    over_heads = of_queries.weight.dim() == 1 and len(spread) > 1
    size = squares.mean() if over_heads else squares.mean(-1, keepdim=True)
    return squares / size.clamp_min(torch.finfo().tiny) * spread.square() + mean.square()


def _product_squares(
    attention: nn.Module, norm: nn.Module | None, sizes: tuple[int, int]
) -> Tensor | None:
    """Mean squares [q_heads, head_dim] of what `q_proj` makes of white input to a norm."""
    linear = _base(attention.q_proj)
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


def _base(linear: nn.Module) -> nn.Module:
    """Return the linear that PEFT's adapters are around, or the linear itself."""
    return vars(linear)["_modules"].get("base_layer", linear)


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


def _turned_share(model: PreTrainedModel) -> float:
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
