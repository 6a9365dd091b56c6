"""Quantize and dequantize one tensor: x_hat = codes * scale + zero_point, for every `TensorSpec`.

Statistics and codes are computed in float32 (float64 for float64 input) from parameters already
rounded to `param_dtype`, so a stored code is the nearest level of the levels that are stored.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from duotone.quant.checks import checked
from duotone.quant.classes import assign_classes, class_counts, class_order
from duotone.quant.grouping import group, group_sizes, ungroup
from duotone.quant.ranges import (
    energy_gain,
    energy_weights,
    fitted_gain,
    lloyd_range,
    masked_mean,
    nearest_code,
    symmetric_scale,
    uniform_range,
)
from duotone.quant.spec import TensorSpec


@dataclass(frozen=True)
class Quantized:
    """Codes of one tensor [..., tokens, channels] with their parameters, not yet packed.

    codes: uint8, the shape of x. At sign-and-magnitude groups the magnitude.
    scale, zero_point: one entry per group: [..., blocks, channels] along tokens,
        [..., tokens, channel groups] along channels, [..., blocks, 1] along the span.
        zero_point is None for mapping="symmetric" and 0 in a hybrid's symmetric groups.
    negative: the signs, of the shape of x, False in a hybrid's asymmetric groups; None for
        mapping="asymmetric".
    symmetric: which groups of a hybrid are symmetric, of the shape of scale; else None.
    classes: class number of each channel of each block, of the shape of scale, where the spec has
        classes; a channel of 0 bits has scale 0 and its mean as zero_point.
    """

    codes: UInt8[Tensor, "*b tokens channels"]
    scale: Float[Tensor, "*b rows columns"]
    zero_point: Float[Tensor, "*b rows columns"] | None
    negative: Bool[Tensor, "*b tokens channels"] | None
    symmetric: Bool[Tensor, "*b rows columns"] | None
    classes: UInt8[Tensor, "*b rows columns"] | None
    spec: TensorSpec
    dtype: torch.dtype

    def dequantize(self) -> Float[Tensor, "*b tokens channels"]:
        """Return x_hat in the dtype of the input, computed in float32 (float64 for float64)."""
        tokens, channels = self.codes.shape[-2:]

        def expand(parameter: Tensor) -> Tensor:
            return expand_parameter(parameter, self.spec, tokens, channels)

        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        value = self.codes.to(wide)
        if self.negative is not None:
            value = torch.where(self.negative, -value, value)
        value = value * expand(self.scale).to(wide)
        if self.zero_point is not None:
            value = value + expand(self.zero_point).to(wide)
        return value.to(self.dtype)


def expand_parameter(parameter: Tensor, spec: TensorSpec, tokens: int, channels: int) -> Tensor:
    """Repeat a per-group parameter to one entry per element, [..., tokens, channels]."""
    sizes = group_sizes(spec, tokens, channels)
    if spec.along == "channels":
        return parameter.repeat_interleave(sizes.channels, -1)[..., :channels]
    rows = parameter.repeat_interleave(sizes.tokens, -2)[..., :tokens, :]
    return rows.expand(*rows.shape[:-1], channels)


def check_finite(x: Tensor, mask: Tensor | None = None) -> None:
    """Raise ValueError naming the first non-finite element of x that the mask does not exclude."""
    if not checked():
        return
    bad = ~torch.isfinite(x)
    if mask is not None:
        bad = bad & mask.unsqueeze(-1)
    if bad.any():
        where = tuple(int(i) for i in bad.nonzero()[0])
        raise ValueError(
            f"only finite values can be quantized; got {float(x[where])} at index {where} of a "
            f"tensor of shape {tuple(x.shape)} ({int(bad.sum())} such elements). "
            "Check the model's output before the cache."
        )


def quantize(
    x: Float[Tensor, "*b tokens channels"],
    spec: TensorSpec,
    mask: Bool[Tensor, "*b tokens"] | None = None,
    decoding: bool = False,
) -> Quantized:
    """Quantize x [..., tokens, channels] as `spec` says.

    mask: False at padding tokens: they enter no statistic, and their codes are 0.
    it all channels matter alike.
    decoding: x are tokens of a decode step, for `spec.hybrid_at`.
    Order of the steps: range (min/max times shrink, or Lloyd), codes, then eta, energy and gain,
    which move levels and leave codes alone. Ties between two levels go up.
    Errors: a non-finite element at a valid token, or a range that param_dtype cannot hold.
    """
    check_finite(x, mask)
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if mask is None:
        mask = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    wide = wide.masked_fill(~mask.unsqueeze(-1), 0)
    groups = group(wide, spec)
    valid = group(mask.unsqueeze(-1).expand_as(wide), spec)
    if spec.classes:
        result = _by_classes(groups, valid, spec)
    elif decoding and spec.hybrid_at == "prefill":
        result = _symmetric_hybrid(groups, valid, spec)
    else:
        result = _QUANTIZERS[spec.mapping](groups, valid, spec)
    return _assemble(result, x, spec)


@dataclass(frozen=True)
class _Groups:
    """What a mapping makes of grouped x [*g, n]: codes and signs [*g, n], parameters [*g, 1]."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    negative: Tensor | None = None
    symmetric: Tensor | None = None
    classes: Tensor | None = None

    def decode(self) -> Tensor:
        value = torch.where(self.negative, -self.codes, self.codes) * self.scale
        return value if self.zero_point is None else value + self.zero_point


def _stored(parameter: Tensor, spec: TensorSpec) -> Tensor:
    """Round to param_dtype and back. Errors: a value out of its range."""
    dtype = getattr(torch, spec.param_dtype)
    rounded = parameter.to(dtype)
    if checked() and not torch.isfinite(rounded).all():
        raise ValueError(
            f"scale and zero_point must fit param_dtype {spec.param_dtype} "
            f"(up to {torch.finfo(dtype).max:g}); got {float(parameter.abs().max()):g}. "
            "Use param_dtype='bfloat16' or 'float32'."
        )
    return rounded.to(parameter.dtype)


def _asymmetric(x: Tensor, mask: Tensor, spec: TensorSpec) -> _Groups:
    codes, scale, zero_point = _levels(x, mask, spec)
    scale, zero_point = _with_gain(x, codes, mask, spec, scale, zero_point)
    return _Groups(codes, scale, zero_point, negative=torch.zeros_like(mask))


def _levels(x: Tensor, mask: Tensor, spec: TensorSpec) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, zero_point) with eta applied, before any gain."""
    if spec.levels == "lloyd":
        scale, zero_point = lloyd_range(x, mask, spec.bits)
    else:
        scale, zero_point = uniform_range(x, mask, spec.bits, spec.shrink)
    scale, zero_point = _stored(scale, spec), _stored(zero_point, spec)
    codes = nearest_code(x, scale, zero_point, spec.bits) * mask
    if spec.eta:
        # XQuant eq. 12; its Algorithm 2 forgets the factor 2**bits - 1, its code has it.
        zero_point = _stored(zero_point + spec.eta * scale * ((1 << spec.bits) - 1), spec)
        scale = _stored((1 - 2 * spec.eta) * scale, spec)
    return codes, scale, zero_point


def _with_gain(
    x: Tensor, codes: Tensor, mask: Tensor, spec: TensorSpec, scale: Tensor, zero_point: Tensor
) -> tuple[Tensor, Tensor]:
    """Scale the levels about the mean, by energy and then by the gain; codes stay."""
    if spec.gain == 1 and not spec.energy:
        return scale, zero_point
    mean = masked_mean(x, mask)
    x, offset = (x - mean) * mask, zero_point - mean
    if spec.energy:
        gain = energy_gain(x, (codes * scale + offset) * mask, spec.energy)
        scale, offset = gain * scale, gain * offset
    gain = spec.gain
    if gain == "fit":
        gain = fitted_gain(x, (codes * scale + offset) * mask)
    return _stored(gain * scale, spec), _stored(mean + gain * offset, spec)


def _symmetric(x: Tensor, mask: Tensor, spec: TensorSpec) -> _Groups:
    scale = symmetric_scale(x, mask, spec.bits, spec.shrink, spec.levels == "lloyd")
    scale = _stored(scale, spec)
    codes = nearest_code(x.abs(), scale, torch.zeros_like(scale), spec.bits) * mask
    # The full range 2 * max|x| loses eta of its width at both ends.
    scale = _stored((1 - 2 * spec.eta) * scale, spec)
    return _Groups(codes, scale, negative=x < 0)


def _hybrid(x: Tensor, mask: Tensor, spec: TensorSpec) -> _Groups:
    asymmetric, symmetric = _asymmetric(x, mask, spec), _symmetric(x, mask, spec)
    errors = [
        ((g.decode() - x).abs() * mask).sum(-1, keepdim=True) for g in (asymmetric, symmetric)
    ]
    choose = errors[1] < errors[0]
    return _Groups(
        torch.where(choose, symmetric.codes, asymmetric.codes),
        torch.where(choose, symmetric.scale, asymmetric.scale),
        torch.where(choose, 0.0, asymmetric.zero_point),
        negative=symmetric.negative & choose,
        symmetric=choose,
    )


def _symmetric_hybrid(x: Tensor, mask: Tensor, spec: TensorSpec) -> _Groups:
    """A hybrid of symmetric groups alone: the other mode is not computed."""
    result = _symmetric(x, mask, spec)
    symmetric = torch.ones_like(result.scale, dtype=torch.bool)
    return replace(result, zero_point=torch.zeros_like(result.scale), symmetric=symmetric)


def _by_classes(x: Tensor, mask: Tensor, spec: TensorSpec) -> _Groups:
    """Grouped x [..., blocks, channels, n]: sort channels by class, quantize each class, unsort."""
    numbers = assign_classes(_power_about_mean(x, mask, spec), spec)
    order = class_order(numbers).unsqueeze(-1)
    counts = class_counts(spec, x.shape[-2])
    sizes = [count for _, count in counts]
    sorted_x, sorted_mask = (t.gather(-2, order.expand_as(t)).split(sizes, -2) for t in (x, mask))
    pieces = [
        _one_class(*part, spec, bits)
        for (bits, _), *part in zip(counts, sorted_x, sorted_mask, strict=True)
    ]
    codes, scale, zero_point = (
        _unsorted(torch.cat(rows, -2), order) for rows in zip(*pieces, strict=True)
    )
    scale, zero_point = _with_gain(x, codes, mask, spec, scale, zero_point)
    negative = torch.zeros_like(mask)
    return _Groups(codes, scale, zero_point, negative, classes=numbers.unsqueeze(-1))


def _power_about_mean(x: Tensor, mask: Tensor, spec: TensorSpec) -> Tensor:
    """What a channel's error would cost, [..., blocks, channels]: the order of the classes."""
    centred = (x - masked_mean(x, mask)) * mask
    return (energy_weights(centred, spec.energy) * centred.square()).sum(-1)


def _unsorted(rows: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(rows).scatter_(-2, order.expand_as(rows), rows)


def _one_class(
    x: Tensor, mask: Tensor, spec: TensorSpec, bits: int
) -> tuple[Tensor, Tensor, Tensor]:
    if bits:
        return _levels(x, mask, spec.replace(bits=bits, classes=None))
    mean = _stored(masked_mean(x, mask), spec)
    return torch.zeros_like(x), torch.zeros_like(mean), mean


_QUANTIZERS = {"asymmetric": _asymmetric, "symmetric": _symmetric, "hybrid": _hybrid}


def _assemble(result: _Groups, x: Tensor, spec: TensorSpec) -> Quantized:
    tokens, channels = x.shape[-2:]
    dtype = getattr(torch, spec.param_dtype)

    def elements(grouped: Tensor) -> Tensor:
        return ungroup(grouped, spec, tokens, channels)

    asymmetric = spec.mapping == "asymmetric"
    zero_point = None if result.zero_point is None else result.zero_point.squeeze(-1).to(dtype)
    return Quantized(
        codes=elements(result.codes).to(torch.uint8),
        scale=result.scale.squeeze(-1).to(dtype),
        zero_point=zero_point,
        negative=None if asymmetric else elements(result.negative),
        symmetric=None if result.symmetric is None else result.symmetric.squeeze(-1),
        classes=None if result.classes is None else result.classes.squeeze(-1),
        spec=spec,
        dtype=x.dtype,
    )
