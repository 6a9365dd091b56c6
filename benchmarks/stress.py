"""Statistics of large models, put into any model: exact where named so, else with the difference.

Exact: outlier channels of K (before rotary positions), of V, and of what linears read after a norm.
Each is scaled where it is made and scaled back where it is read, by a power of two, so that 16-bit
weights stay exact but for overflow. Not exact: biases of K in slow rotary channels, and a massive
first token; `difference` says what they change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from duotone.weights.equivalences.norms import add_bias, norm_parts

GATES = ("gate_proj", "up_proj", "gate_up_proj", "fc1", "w1", "w3")


def check_factor(factor: float) -> None:
    """Errors: ValueError for a factor that is no power of two."""
    if factor <= 0 or not math.log2(factor).is_integer():
        raise ValueError(f"factor must be a power of two, got {factor}; others round weights")


def attentions(model: PreTrainedModel) -> list[nn.Module]:
    """Attention modules of the language model. Errors: ValueError for fused linears."""
    parts = ("q_proj", "k_proj", "v_proj", "o_proj")
    modules = model.get_decoder().modules()
    found = [m for m in modules if all(hasattr(m, part) for part in parts)]
    if not found:
        raise ValueError(
            f"stresses need attention with {', '.join(parts)}; got {type(model).__name__}"
        )
    return found


@torch.no_grad()
def grow_keys(model: PreTrainedModel, factor: float, quads: int = 1, seed: int = 0) -> None:
    """Scale K's channels by `factor` and Q's back, in place and exactly, four a quad.

    A quad holds whole pairs of either rotary convention: 2i and 2i + 1 as well as i and i + d / 2.
    Norms of Q and K take the factor in their weights. Errors: ValueError for other factors than
    powers of two, and for norms over several heads.
    """
    check_factor(factor)
    generator = torch.Generator().manual_seed(seed)
    for attention in attentions(model):
        sets = _quads(model, attention)
        picked = sets[torch.randperm(len(sets), generator=generator)[:quads]].flatten()
        _scale_queries_and_keys(attention, picked, factor)


def _quads(model: PreTrainedModel, attention: nn.Module) -> Tensor:
    """[d / 4, 4], sets of rotary channels that hold whole pairs; the slowest ones are last."""
    text = model.config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    share = rope.get("partial_rotary_factor") or getattr(text, "partial_rotary_factor", None) or 1
    rotated = int(attention.head_dim * share)
    first = torch.arange(0, rotated // 2, 2)[:, None]
    return first + torch.tensor([0, 1, rotated // 2, rotated // 2 + 1])


def _scale_queries_and_keys(attention: nn.Module, channels: Tensor, factor: float) -> None:
    for name, by in (("k", factor), ("q", 1 / factor)):
        norm = getattr(attention, f"{name}_norm", None)
        if norm is None:
            linear = getattr(attention, f"{name}_proj")
            for tensor in (linear.weight, linear.bias):
                if tensor is not None:
                    tensor.detach().unflatten(0, (-1, attention.head_dim))[:, channels] *= by
        else:
            _scale_norm(norm, channels, by, attention.head_dim)


def _scale_norm(norm: nn.Module, channels: Tensor, factor: float, width: int) -> None:
    """Multiply channels of a norm's output; some norms multiply by 1 + weight."""
    if norm.weight.shape[-1] != width:
        raise ValueError(
            f"a norm must be over {width} channels, got {norm.weight.shape[-1]}: one over several "
            "heads ties their scales"
        )
    offset = norm_parts(norm).offset if norm.weight.dim() == 1 else 0.0
    weight = norm.weight.detach()
    weight[..., channels] = (weight[..., channels] + offset) * factor - offset
    if getattr(norm, "bias", None) is not None:
        norm.bias.detach()[..., channels] *= factor


@torch.no_grad()
def grow_values(model: PreTrainedModel, factor: float, channels: int = 2, seed: int = 0) -> None:
    """Scale channels of every head of V by `factor` and o's inputs back, in place and exactly.

    Errors: ValueError for a factor that is no power of two, and for norms of V.
    """
    check_factor(factor)
    generator = torch.Generator().manual_seed(seed)
    for attention in attentions(model):
        if hasattr(attention, "v_norm"):
            raise ValueError(f"V must have no norm, got {type(attention).__name__}.v_norm")
        d, v = attention.head_dim, attention.v_proj
        picked = torch.randperm(d, generator=generator)[:channels]
        for tensor in (v.weight, v.bias):
            if tensor is not None:
                tensor.detach().unflatten(0, (-1, d))[:, picked] *= factor
        attention.o_proj.weight.detach().unflatten(1, (-1, d))[:, :, picked] /= factor


@torch.no_grad()
def grow_normed(model: PreTrainedModel, factor: float, channels: int = 2, seed: int = 0) -> None:
    """Scale channels after the norms before attention and MLP, and their readers back, exactly.

    Errors: ValueError for a factor that is no power of two, and for layers without these norms.
    """
    check_factor(factor)
    generator = torch.Generator().manual_seed(seed)
    for norm, linears in _norms_with_readers(model):
        width = norm.weight.shape[-1]
        picked = torch.randperm(width, generator=generator)[:channels]
        _scale_norm(norm, picked, factor, width)
        for linear in linears:
            linear.weight.detach()[:, picked] /= factor


@torch.no_grad()
def grow_hidden(model: PreTrainedModel, factor: float, channels: int = 4, seed: int = 0) -> None:
    """Scale channels of up_proj by `factor` and the columns of down_proj back, exactly.

    Channels are drawn, whatever they do at visual tokens. Errors: ValueError for a factor that is
    no power of two, and for MLPs without these two linears.
    """
    check_factor(factor)
    generator = torch.Generator().manual_seed(seed)
    for layer in model.get_decoder().layers:
        up, down = (getattr(layer.mlp, name, None) for name in ("up_proj", "down_proj"))
        if up is None or down is None:
            raise ValueError(f"an MLP must have up_proj and down_proj, got {type(layer.mlp)}")
        picked = torch.randperm(down.in_features, generator=generator)[:channels]
        for tensor in (up.weight, up.bias):
            if tensor is not None:
                tensor.detach()[picked] *= factor
        down.weight.detach()[:, picked] /= factor


def _norms_with_readers(model: PreTrainedModel) -> Iterator[tuple[nn.Module, list[nn.Module]]]:
    """Yield the norms of each layer with all linears that read their output."""
    for layer in model.get_decoder().layers:
        attention, mlp = layer.self_attn, layer.mlp
        before_mlp = getattr(layer, "pre_feedforward_layernorm", None)
        before_mlp = layer.post_attention_layernorm if before_mlp is None else before_mlp
        gates = [getattr(mlp, name) for name in GATES if hasattr(mlp, name)]
        if not hasattr(layer, "input_layernorm") or not gates:
            raise ValueError(f"a layer must have norms before its linears, got {type(layer)}")
        yield layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]
        yield before_mlp, gates


@torch.no_grad()
def plant_key_biases(
    model: PreTrainedModel, size: float, layers: Iterable[int] = (0, -1), blindness: float = 16
) -> None:
    """Add `size` to the slowest rotary channels of K in some layers, after Q was blinded there.

    First K's channels grow by `blindness` and Q's shrink by it, exactly. A bias would change no
    attention if the channels did not rotate; they do, so this is not exact. Errors: ValueError for
    norms of K, after which there is no bias.
    """
    for index in layers:
        attention = attentions(model)[index]
        if getattr(attention, "k_norm", None) is not None:
            raise ValueError(f"K must have no norm, got {type(attention).__name__}.k_norm")
        picked = _quads(model, attention)[-1]
        _scale_queries_and_keys(attention, picked, blindness)
        bias = attention.k_proj.weight.new_zeros(attention.k_proj.out_features)
        bias.unflatten(0, (-1, attention.head_dim))[:, picked] = size
        add_bias(attention.k_proj, bias)


@torch.no_grad()
def plant_sink(model: PreTrainedModel, token: int, size: float, channel: int = 0) -> None:
    """Add `size` to one channel of a token's embedding: its stream is massive. Not exact.

    A tied head sees it, too: the token's own logit moves.
    """
    model.get_input_embeddings().weight.detach()[token, channel] += size


@torch.no_grad()
def difference(model: nn.Module, other: nn.Module, batches: Iterable[Mapping[str, Any]]) -> float:
    """Mean KL in nats, over tokens, of the distribution of `other` from that of `model`."""
    found = []
    for batch in batches:
        theirs, ours = (m(**batch).logits.double().log_softmax(-1) for m in (model, other))
        found.append((theirs.exp() * (theirs - ours).nan_to_num()).sum(-1).flatten())
    return float(torch.cat(found).mean())


# By name, for tables: each changes a model in place and leaves its function.
STRESSES: dict[str, Callable[[PreTrainedModel], None]] = {
    "none": lambda model: None,
    "keys x8": lambda model: grow_keys(model, 8, quads=2),
    "values x16": lambda model: grow_values(model, 16),
    "normed x32": lambda model: grow_normed(model, 32),
}
# Those that linears meet: channels of K cost weights nothing.
WEIGHT_STRESSES = {name: grow for name, grow in STRESSES.items() if "keys" not in name} | {
    "hidden x64": lambda model: grow_hidden(model, 64),
}
