"""Coders that the product does not have, in plain torch: what comes back replaces K and V.

A picture's K and V are coded and decoded by a spec's quantizers as the product would (parts by
prominence, bases, levels), with one thing changed; the model then reads question and answer from
what came back, as 16-bit tokens. Without a change it is the product's cache but for rounding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from duotone import CacheSpec, TensorSpec
from duotone.inference.batch import make_cache
from duotone.quant.affine import quantize
from duotone.quant.bases import Turn, turn
from duotone.quant.classes import class_counts
from duotone.quant.rotation import hadamard
from duotone.tune.bits import Held, held
from duotone.tune.objective import Measured, forced_rows
from duotone.tune.prefilled import Prefilled, read_tail

SWEEPS = 3
# Of gains by channel: bounds, and what is added to the diagonal of their equations.
GAINS, RIDGE = (0.5, 3.0), 1e-3
Metrics = Mapping[tuple[int, str], Tensor]


@dataclass(frozen=True)
class Change:
    """What differs from the product.

    metrics: codes are chosen by coordinate descent under them, [kv_heads, d, d] by layer and
    tensor. gains: tensors whose levels get a gain per channel. theta: keys are coded before RoPE of
    this base. order_by: a spec whose basis of keys orders the tokens. shared: pairs of layers keep
    one code per number.
    """

    metrics: Metrics | None = None
    gains: tuple[str, ...] = ()
    theta: float | None = None
    order_by: CacheSpec | None = None
    shared: bool = False


def rotated(x: Tensor, positions: Tensor, theta: float, sign: int = 1) -> Tensor:
    """RoPE of x [batch, heads, tokens, d] at positions [batch, tokens]; undone by sign -1."""
    half = x.shape[-1] // 2
    rates = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angle = (positions[:, None, :, None] * rates).float()
    cos, sin = angle.cos(), sign * angle.sin()
    first, second = x.float().split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def matrices(reference: str | None, like: Tensor) -> Turn:
    """Into a basis and back."""
    if reference in (None, "hadamard"):
        size = like.shape[-1]
        plain = torch.eye(size) if reference is None else hadamard(size).float()
        return Turn(*([plain.expand(like.shape[1], -1, -1).to(like)] * 3))
    return turn(reference, torch.float32, like.device)


def in_spans(x: Tensor, m: Tensor) -> Tensor:
    """x [batch, heads, spans, tokens, d] times m [heads, d, d]."""
    return x @ m[:, None]


def levels_of(codes: Tensor, found: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(scale, zero_point, largest code) [.., 1, d] of a block's channels."""
    spec = found.spec
    scale, zero = found.scale.float(), found.zero_point.float()
    if not spec.classes:
        return scale, zero, torch.full_like(scale, 2.0**spec.bits - 1)
    widths = torch.tensor([bits for bits, _ in class_counts(spec, codes.shape[-1])])
    return scale, zero, 2.0 ** widths.to(codes.device)[found.classes.long()] - 1


def descend(x: Tensor, codes: Tensor, levels: tuple[Tensor, ...], metric: Tensor) -> Tensor:
    """Codes of lower error dx M dx^T: one channel after the other takes its best code.

    x [batch, heads, spans, tokens, d]; metric [heads, d, d] of what errors in x cost.
    """
    scale, zero, top = levels
    error = codes * scale + zero - x
    metric = metric[:, None, None].to(x)
    for channel in [c for _ in range(SWEEPS) for c in range(x.shape[-1])]:
        step, most = scale[..., channel], top[..., channel]
        slope = (error * metric[..., channel, :]).sum(-1) / metric[..., channel, channel]
        coded, before = step > 0, codes[..., channel]
        wish = before - slope / torch.where(coded, step, 1.0)
        best = torch.minimum(torch.floor(wish + 0.5).clamp(min=0), most)
        best = torch.where(coded, best, before)
        error[..., channel] += (best - before) * step
        codes[..., channel] = best
    return codes


def channel_gains(x: Tensor, x_hat: Tensor) -> Tensor:
    """Gains [.., 1, d] that make scores right together, for queries that vary as the keys do.

    Least squares of sum_c q_c x_c on sum_c g_c q_c x_hat_c with E q q^T = S = cov(x); of one gain
    for all channels that is `ranges.fitted_gain`.
    """
    x, x_hat = (t - t.mean(-2, keepdim=True) for t in (x, x_hat))
    own = x.mT @ x
    left = own * (x_hat.mT @ x_hat)
    right = (own * (x_hat.mT @ x)).sum(-1, keepdim=True)
    level = left.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    ridge = RIDGE * torch.where(level > 0, level, 1.0)
    # Towards a gain of 1.
    identity = torch.eye(x.shape[-1], device=x.device)
    found = torch.linalg.solve(left + ridge * identity, right + ridge)
    return found.clamp(*GAINS).mT


def coded(x: Tensor, spec: TensorSpec, metric: Tensor | None, gain: bool) -> Tensor:
    """What comes back of one part of the spans, in its basis."""
    found = quantize(x, spec.replace(transform=None))
    codes = found.codes.float()
    scale, zero, top = levels_of(codes, found)
    if metric is not None:
        codes = descend(x, codes, (scale, zero, top), metric)
    if gain:
        mean = x.mean(-2, keepdim=True)
        gains = channel_gains(x, codes * scale + zero)
        scale, zero = (gains * scale).half().float(), (mean + gains * (zero - mean)).half().float()
    return codes * scale + zero


def places_of_order(c: Tensor) -> Tensor:
    """Tokens of spans by falling prominence, [batch, heads, spans, tokens, 1]."""
    distance = (c - c.mean(-2, keepdim=True)).square().sum(-1)
    return distance.argsort(dim=-1, descending=True, stable=True)[..., None]


def cut(spec: CacheSpec, tokens: int) -> list[tuple[Any, slice]]:
    """(policy, tokens) of the parts of a span in order."""
    if spec.background is None:
        return [(spec.visual, slice(0, tokens))]
    front = -int(-spec.foreground * tokens // 1)
    return [(spec.visual, slice(0, front)), (spec.background, slice(front, tokens))]


def decoded_layer(
    layer: int, key: Tensor, value: Tensor, spec: CacheSpec, change: Change, order: Tensor | None
) -> tuple[Tensor, Tensor]:
    """K and V [batch, heads, spans, tokens, d] of a layer as they come back."""
    own, came = spec.at_layer(layer), []
    turns = {w: matrices(getattr(own.visual, w).transform, key) for w in ("key", "value")}
    coefficients = {"key": in_spans(key, turns["key"].into)}
    coefficients |= {"value": in_spans(value, turns["value"].into)}
    if own.background is None:
        order = None
    elif order is None:
        order = places_of_order(coefficients["key"])
    for which, x in coefficients.items():
        metric = None
        if change.metrics is not None:
            back = turns[which].back
            metric = back @ change.metrics[layer, which].to(back) @ back.mT
        x = x if order is None else x.gather(-2, order.expand_as(x))
        parts = [
            coded(x[..., part, :], getattr(policy, which), metric, which in change.gains)
            for policy, part in cut(own, x.shape[-2])
        ]
        made = torch.cat(parts, -2)
        if order is not None:
            made = torch.empty_like(made).scatter_(-2, order.expand_as(made), made)
        came.append(in_spans(made, turns[which].back))
    return came[0], came[1]


def decoded_pair(
    layers: tuple[int, int], states: list[tuple[Tensor, Tensor]], spec: CacheSpec
) -> list[tuple[Tensor, Tensor]]:
    """Two layers with one basis and one code per number, each with means and scales of its own.

    What is coded is the mean of both layers' coefficients in units of their deviations, the second
    with the sign of its correlation.
    """
    own, order, came = spec.at_layer(layers[0]), None, []
    for which in ("key", "value"):
        turns = matrices(getattr(own.visual, which).transform, states[0][0])
        both = [in_spans(pair[which == "value"], turns.into) for pair in states]
        if order is None:
            centred = [x - x.mean(-2, keepdim=True) for x in both]
            level = [x.square().mean((-2, -1), keepdim=True).sqrt() for x in centred]
            pairs = zip(centred, level, strict=True)
            order = places_of_order(torch.cat([x / one for x, one in pairs], -1))
        both = [x.gather(-2, order.expand_as(x)) for x in both]
        parts = [
            _shared([x[..., part, :] for x in both], getattr(policy, which))
            for policy, part in cut(own, both[0].shape[-2])
        ]
        for made in (torch.cat(part, -2) for part in zip(*parts, strict=True)):
            placed = torch.empty_like(made).scatter_(-2, order.expand_as(made), made)
            came.append(in_spans(placed, turns.back))
    return [(came[0], came[2]), (came[1], came[3])]


def _shared(both: list[Tensor], spec: TensorSpec) -> list[Tensor]:
    """What comes back of one part of two layers, from codes of their mean."""
    means = [x.mean(-2, keepdim=True) for x in both]
    centred = [x - mean for x, mean in zip(both, means, strict=True)]
    deviations = [x.square().mean(-2, keepdim=True).sqrt().clamp_min(1e-6) for x in centred]
    sign = (centred[0] * centred[1]).sum(-2, keepdim=True).sign()
    unit = [x / d for x, d in zip(centred, deviations, strict=True)]
    level = (deviations[0] * deviations[1]).sqrt()
    joint = (unit[0] + sign * unit[1]) / 2 * level
    found = quantize(joint, spec.replace(transform=None, gain=1.0, energy=0.0))
    codes = found.codes.float()
    codes = codes - codes.mean(-2, keepdim=True)
    power = codes.square().sum(-2, keepdim=True)
    made = []
    for x, mean in zip(centred, means, strict=True):
        scale = (codes * x).sum(-2, keepdim=True) / torch.where(power > 0, power, 1.0)
        made.append(mean.half().float() + codes * scale.half().float())
    return made


@torch.inference_mode()
def decoded(prefilled: Prefilled, spec: CacheSpec, change: Change, span: int) -> DynamicCache:
    """The 16-bit cache with the pictures' K and V as they come back. span: tokens of a picture."""
    batch, read = prefilled.batch, prefilled.read
    mask = batch.visual_mask[:, :read]
    index = mask.nonzero()[:, 1].view(len(mask), 1, -1, 1)
    positions = (batch.attention_mask[:, :read].cumsum(-1) - 1).clamp(min=0)
    places = positions.gather(1, index[:, 0, :, 0])

    def taken(x: Tensor) -> Tensor:
        return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])).float()

    def put(x: Tensor, spans: Tensor) -> Tensor:
        at = index.expand(-1, x.shape[1], -1, x.shape[3])
        return x.scatter(2, at, spans.flatten(2, 3).to(x.dtype))

    def split(x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, span))

    dense, states = prefilled.dense.layers, []
    for layer, held_layer in enumerate(dense):
        key, value, order = taken(held_layer.keys), taken(held_layer.values), None
        if change.order_by is not None:
            basis = matrices(change.order_by.at_layer(layer).visual.key.transform, key)
            order = places_of_order(in_spans(split(key), basis.into))
        if change.theta is not None:
            key = rotated(key, places, change.theta, -1)
        if change.shared:
            states.append((split(key), split(value)))
            continue
        key, value = decoded_layer(layer, split(key), split(value), spec, change, order)
        if change.theta is not None:
            key = split(rotated(key.flatten(2, 3), places, change.theta))
        states.append((key, value))
    if change.shared:
        pairs = [(i, i + 1) for i in range(0, len(states), 2)]
        states = [s for i, j in pairs for s in decoded_pair((i, j), states[i : j + 1], spec)]
    cache = DynamicCache()
    for layer, (key, value) in enumerate(states):
        cache.update(put(dense[layer].keys, key), put(dense[layer].values, value), layer)
    return cache


@torch.inference_mode()
def held_by(model: Any, prefilled: Prefilled, spec: CacheSpec, shared: bool) -> Held:
    """Bytes of the product's cache by that spec; of codes half, where two layers share them."""
    batch, read = prefilled.batch, prefilled.read
    cache = make_cache(model, spec, batch, "reference")
    masks = {"visual_mask": batch.visual_mask, "attention_mask": batch.attention_mask}
    cache.absorb(prefilled.dense, **{name: mask[:, :read] for name, mask in masks.items()})
    found = held(cache, batch.visual_mask, "visual")
    if shared:
        saved = cache.memory().codes_bytes / 2
        found = replace(found, held_bytes=found.held_bytes - saved)
    cache.detach()
    return found


@torch.inference_mode()
def measure_change(
    model: Any, prefilled: Prefilled, spec: CacheSpec, change: Change, span: int
) -> Measured:
    """`tune.objective.measure` of a changed coder."""
    cache = decoded(prefilled, spec, change, span)
    logits = read_tail(model, prefilled, cache, [slice(0, prefilled.tail_tokens)])
    rows = forced_rows(prefilled, logits)
    return Measured(rows, held_by(model, prefilled, spec, change.shared))
