"""Quantize and dequantize one tensor: x_hat = codes * scale + zero_point, for every `TensorSpec`.

Statistics and codes are computed in float32 (float64 for float64 input). Codes are chosen with
parameters already rounded to `param_dtype`: a code names the nearest of the stored levels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from duotone.quant.checks import checked, unchecked
from duotone.quant.classes import class_widths
from duotone.quant.codebooks import UNIFORM, decoded_levels, gaussian_codes
from duotone.quant.grouping import group, group_sizes, ungroup
from duotone.quant.honours import check_packed, check_read
from duotone.quant.levels import (
    chosen_levels,
    decoding_levels,
    keeps_ends,
    needs_codes,
    stored,
)
from duotone.quant.ranges import clipped, nearest_code, symmetric_scale
from duotone.quant.small_floats import PARAM_TYPES, lowest_levels
from duotone.quant.spec import TensorSpec

# Outliers make a group wide if most elements lie within half of this share of an end point.
WIDE = 1 / 6


@dataclass(frozen=True)
class Quantized:
    """Codes of one tensor [..., tokens, channels] with their parameters, not yet packed.

    codes: uint8, the shape of x; in sign-and-magnitude groups the magnitude.
    scale, zero_point: one entry per group: [..., blocks, channels] along tokens,
        [..., tokens, channel groups] along channels, [..., blocks, 1] along the span.
        zero_point is None for mapping="symmetric" and 0 in a hybrid's symmetric groups. Of
        param_dtype "float8" it is the middle of the levels (`quant.small_floats`).
    negative: signs, of the shape of x, False in a hybrid's asymmetric groups; None for
        mapping="asymmetric" and for codebooks.
    symmetric: which groups of a hybrid are symmetric, of the shape of scale; else None.
    classes: class number of each channel of each block, of the shape of scale, or None. A channel
        of 0 bits has scale 0 and its mean as zero_point.
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
        check_read(self.spec)
        tokens, channels = self.codes.shape[-2:]

        def expand(parameter: Tensor) -> Tensor:
            return expand_parameter(parameter, self.spec, tokens, channels)

        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        value = decoded_levels(self.codes, self.spec.codebook, self.spec.bits, wide)
        if self.negative is not None:
            value = torch.where(self.negative, -value, value)
        value = value * expand(self.scale).to(wide)
        offset = self.offset
        if offset is not None:
            value = value + expand(offset).to(wide)
        return value.to(self.dtype)

    @property
    def offset(self) -> Float[Tensor, "*b rows columns"] | None:
        """Addend to codes * scale; None: nothing."""
        if self.spec.param_dtype != "float8":
            return self.zero_point
        top = 2**self.spec.bits - 1
        if self.classes is not None:
            widths = class_widths(self.spec, self.classes.shape[-1], self.scale.device)
            top = 2.0 ** widths[self.classes.long()] - 1
        return lowest_levels(self.scale, self.zero_point, top)


def expand_parameter(parameter: Tensor, spec: TensorSpec, tokens: int, channels: int) -> Tensor:
    """Repeat a per-group parameter to one entry per element, [..., tokens, channels]."""
    sizes = group_sizes(spec, tokens, channels)
    if spec.along == "channels":
        return parameter.repeat_interleave(sizes.channels, -1)[..., :channels]
    rows = parameter.repeat_interleave(sizes.tokens, -2)[..., :tokens, :]
    return rows.expand(*rows.shape[:-1], channels)


def check_finite(x: Tensor, mask: Tensor | None = None) -> None:
    """Raise ValueError naming the first non-finite element of x that the mask does not exclude.

    Integers are refused: they would be decoded to integers.
    """
    if not x.is_floating_point():
        raise ValueError(f"floating point numbers can be quantized; got {x.dtype}. E.g. x.float().")
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
    decoding: x are tokens of a decode step, for `spec.hybrid_at`.
    `transform`, `factors` and `heads` belong to `cache.pack_tensor`; nothing here applies them.
    Order of the steps: range (min/max times shrink, or Lloyd), codes, then eta, energy and gain,
    which move levels and leave codes alone. Ties between two levels go up,
    or as `spec.ties` says.
    Errors: a non-finite element at a valid token, or a range that param_dtype cannot hold.
    """
    check_packed(spec)
    groups, valid = _grouped(x, spec, mask)
    if decoding and spec.hybrid_at == "prefill":
        result = _symmetric_hybrid(groups, valid, spec)
    else:
        result = _QUANTIZERS[spec.mapping](groups, valid, spec)
    return _assemble(result, x, spec)


def has_signs(spec: TensorSpec) -> bool:
    """True where codes are magnitudes, with signs beside them."""
    return spec.mapping != "asymmetric" and spec.codebook == UNIFORM


def _grouped(x: Tensor, spec: TensorSpec, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(x with one group per row, 0 at padding; which elements are valid). Errors: `quantize`."""
    check_finite(x, mask)
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    if mask is None:
        mask = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    wide = wide.masked_fill(~mask.unsqueeze(-1), 0)
    if spec.clip != 1:
        wide = clipped(wide, spec.clip)
    return group(wide, spec), group(mask.unsqueeze(-1).expand_as(wide), spec)


@dataclass(frozen=True)
class BlockLevels:
    """Levels of a block's channels, without codes, in param_dtype.

    chosen_scale, chosen_zero: levels that codes are chosen by. scale, zero_point: levels that codes
    decode to. classes: as in `Quantized`.
    """

    chosen_scale: Float[Tensor, "*b channels"]
    chosen_zero: Float[Tensor, "*b channels"]
    scale: Float[Tensor, "*b channels"]
    zero_point: Float[Tensor, "*b channels"]
    classes: UInt8[Tensor, "*b channels"] | None


def block_levels(
    x: Float[Tensor, "*b tokens channels"],
    spec: TensorSpec,
    mask: Bool[Tensor, "*b tokens"] | None = None,
) -> BlockLevels:
    """Levels of `quantize`, for codes that are made elsewhere. x: one block along tokens.

    spec: asymmetric, along tokens, without groups. Errors: as for `quantize`.
    """
    groups, valid = _grouped(x, spec, mask)
    chosen = chosen_levels(groups, valid, spec)
    codes = chosen.codes(groups, valid) if needs_codes(spec) else None
    levels = (chosen.scale, chosen.zero_point)
    levels += decoding_levels(groups, valid, codes, chosen, spec)
    dtype, classes = PARAM_TYPES[spec.param_dtype], chosen.classes
    numbers = None if classes is None else classes[..., 0, :, 0]
    return BlockLevels(*(x[..., 0, :, 0].to(dtype) for x in levels), numbers)


def exchanged_groups(
    x: Float[Tensor, "*b tokens channels"],
    other: Float[Tensor, "*b tokens channels"],
    spec: TensorSpec,
) -> Float[Tensor, ""]:
    """Share of groups of x that outliers make wide, where codes of `other` exchange the two ends.

    In such a group the codes of `other` put an element at its far end. Nothing here waits for the
    device.
    """
    with unchecked():
        (groups, valid), (others, _) = (_grouped(y, spec, None) for y in (x, other))
        ours, theirs = (chosen_levels(y, valid, spec) for y in (groups, others))
    apart = (ours.codes(groups, valid) - theirs.codes(others, valid)).abs()
    exchanged = (apart == ours.top).any(-1, keepdim=True)
    return (exchanged & keeps_ends(groups, valid, ours, WIDE)).float().mean()


@dataclass(frozen=True)
class _Groups:
    """Result of a mapping for grouped x [*g, n]: codes and signs [*g, n], parameters [*g, 1]."""

    codes: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    negative: Tensor | None = None
    symmetric: Tensor | None = None
    classes: Tensor | None = None

    def decode(self) -> Tensor:
        value = torch.where(self.negative, -self.codes, self.codes) * self.scale
        return value if self.zero_point is None else value + self.zero_point


def _asymmetric(x: Tensor, mask: Tensor, spec: TensorSpec) -> _Groups:
    chosen = chosen_levels(x, mask, spec)
    codes = chosen.codes(x, mask)
    scale, zero_point = decoding_levels(x, mask, codes, chosen, spec)
    return _Groups(codes, scale, zero_point, torch.zeros_like(mask), classes=chosen.classes)


def _symmetric(x: Tensor, mask: Tensor, spec: TensorSpec) -> _Groups:
    if spec.codebook != UNIFORM:
        codes, scale = gaussian_codes(x, mask, spec.bits)
        return _Groups(codes, stored(scale, spec))
    scale = symmetric_scale(x, mask, spec.bits, spec.shrink, spec.levels == "lloyd")
    scale = stored(scale, spec)
    codes = nearest_code(x.abs(), scale, torch.zeros_like(scale), spec.bits, spec.ties) * mask
    # The full range 2 * max|x| loses eta of its width at both ends.
    scale = stored((1 - 2 * spec.eta) * scale, spec)
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
    """Hybrid of symmetric groups alone; the other mode is not computed."""
    result = _symmetric(x, mask, spec)
    symmetric = torch.ones_like(result.scale, dtype=torch.bool)
    return replace(result, zero_point=torch.zeros_like(result.scale), symmetric=symmetric)


_QUANTIZERS = {"asymmetric": _asymmetric, "symmetric": _symmetric, "hybrid": _hybrid}


def _assemble(result: _Groups, x: Tensor, spec: TensorSpec) -> Quantized:
    tokens, channels = x.shape[-2:]
    dtype = PARAM_TYPES[spec.param_dtype]

    def elements(grouped: Tensor) -> Tensor:
        return ungroup(grouped, spec, tokens, channels)

    zero_point = None if result.zero_point is None else result.zero_point.squeeze(-1).to(dtype)
    return Quantized(
        codes=elements(result.codes).to(torch.uint8),
        scale=result.scale.squeeze(-1).to(dtype),
        zero_point=zero_point,
        negative=elements(result.negative) if has_signs(spec) else None,
        symmetric=None if result.symmetric is None else result.symmetric.squeeze(-1),
        classes=None if result.classes is None else result.classes.squeeze(-1),
        spec=spec,
        dtype=x.dtype,
    )
