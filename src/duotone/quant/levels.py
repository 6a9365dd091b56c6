"""Asymmetric levels of groups: levels that codes are chosen by, and levels that codes decode to.

They differ by eta, energy and gain, which move levels and leave codes alone. All functions take
grouped tensors x [..., groups, n] with a mask, as in `quant.ranges`. With classes the groups are
the channels of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.quant.checks import checked
from duotone.quant.classes import assign_classes, class_counts, class_order, class_widths
from duotone.quant.ranges import (
    deviation_range,
    energy_gain,
    energy_weights,
    fitted_gain,
    lloyd_range,
    masked_mean,
    nearest_code,
    uniform_range,
)
from duotone.quant.small_floats import MIDDLE, PARAM_TYPES, SCALE, from_bytes, small_levels
from duotone.quant.tensor_spec import BITS, TensorSpec

# Elements of the smallest group that may keep its end points. In groups of 8 at 1 bit, chance puts
# most elements there in 2 of 100, and perplexity of stories260k rises by half a percent.
LEAST_KEPT = 32


@dataclass(frozen=True)
class ChosenLevels:
    """Levels whose nearest is an element's code, rounded to param_dtype.

    bits: width of all groups, or of each, shaped like scale. classes: each channel's class number.
    ties: as in the spec.
    """

    scale: Tensor
    zero_point: Tensor
    bits: int | Tensor
    classes: Tensor | None = None
    ties: str = "up"

    def codes(self, x: Tensor, mask: Tensor) -> Tensor:
        """Codes of the nearest levels, 0 at padding."""
        levels = (self.scale, self.zero_point)
        if isinstance(self.bits, int):
            return nearest_code(x, *levels, self.bits, self.ties) * mask
        return nearest_code(x, *levels, max(BITS), self.ties).clamp_max(self.top) * mask

    @property
    def top(self) -> float | Tensor:
        """The largest code."""
        return 2**self.bits - 1


def stored(parameter: Tensor, spec: TensorSpec) -> Tensor:
    """Round to param_dtype and back, "float8" to fp16. Errors: a value out of its range."""
    dtype = PARAM_TYPES[spec.param_dtype]
    rounded = parameter.to(dtype)
    if checked() and not torch.isfinite(rounded).all():
        raise ValueError(
            f"scale and zero_point must fit param_dtype {spec.param_dtype} "
            f"(up to {torch.finfo(dtype).max:g}); got {float(parameter.abs().max()):g}. "
            "Use param_dtype='bfloat16' or 'float32'."
        )
    return rounded.to(parameter.dtype)


def chosen_levels(x: Tensor, mask: Tensor, spec: TensorSpec) -> ChosenLevels:
    """Levels between the end points that the spec names, by classes of channels if it has them."""
    if not spec.classes:
        return ChosenLevels(*_range(x, mask, spec, spec.bits), spec.bits, ties=spec.ties)
    numbers = assign_classes(_power_about_mean(x, mask, spec), spec)
    order = class_order(numbers).unsqueeze(-1)
    counts = class_counts(spec, x.shape[-2])
    sizes = [count for _, count in counts]
    sorted_x, sorted_mask = (t.gather(-2, order.expand_as(t)).split(sizes, -2) for t in (x, mask))
    pieces = [
        _range(*part, spec, bits)
        for (bits, _), *part in zip(counts, sorted_x, sorted_mask, strict=True)
    ]
    scale, zero_point = (
        _unsorted(torch.cat(rows, -2), order) for rows in zip(*pieces, strict=True)
    )
    widths = class_widths(spec, x.shape[-2], x.device)
    bits = widths[numbers.long()].unsqueeze(-1)
    return ChosenLevels(scale, zero_point, bits, numbers.unsqueeze(-1), spec.ties)


def needs_codes(spec: TensorSpec) -> bool:
    """True where decoding levels depend on the codes (`decoding_levels`)."""
    return spec.gain != 1 or bool(spec.energy)


def decoding_levels(
    x: Tensor, mask: Tensor, codes: Tensor | None, chosen: ChosenLevels, spec: TensorSpec
) -> tuple[Tensor, Tensor]:
    """(scale, zero_point) that codes decode to; the middle in place of the latter in 8 bits.

    codes: needed where `needs_codes` is True.
    """
    scale, zero_point = chosen.scale, chosen.zero_point
    if spec.eta:
        scale, zero_point = _moved_in(x, mask, chosen, spec)
    scale, zero_point = _with_gain(x, codes, mask, spec, scale, zero_point)
    return (
        _in_8_bits(scale, zero_point, chosen)
        if spec.param_dtype == "float8"
        else (scale, zero_point)
    )


def _in_8_bits(scale: Tensor, zero_point: Tensor, chosen: ChosenLevels) -> tuple[Tensor, Tensor]:
    """(scale, middle) as `small_floats` stores them; parameters are [..., blocks, channels, 1]."""
    rows = (x.squeeze(-1) for x in (scale, zero_point))
    top = chosen.top.squeeze(-1) if isinstance(chosen.top, Tensor) else chosen.top
    scales, middles = small_levels(*rows, top)
    found = (from_bytes(scales, SCALE), from_bytes(middles, MIDDLE))
    return tuple(x.unsqueeze(-1).to(scale.dtype) for x in found)


def _moved_in(
    x: Tensor, mask: Tensor, chosen: ChosenLevels, spec: TensorSpec
) -> tuple[Tensor, Tensor]:
    """Levels with end points moved in by eta of the width; some groups keep theirs (`keeps_ends`).

    XQuant eq. 12. Algorithm 2 there lacks the factor 2**bits - 1; the released code has it.
    """
    zero_point = stored(chosen.zero_point + spec.eta * chosen.scale * chosen.top, spec)
    scale = stored((1 - 2 * spec.eta) * chosen.scale, spec)
    if spec.along != "channels":
        return scale, zero_point
    keep = keeps_ends(x, mask, chosen, spec.eta)
    return torch.where(keep, chosen.scale, scale), torch.where(keep, chosen.zero_point, zero_point)


def keeps_ends(x: Tensor, mask: Tensor, chosen: ChosenLevels, eta: float) -> Tensor:
    """True where most elements of a group lie within eta / 2 of its width of an end point.

    A few large channels make such a group: all others lie at one end, and eta of the width is more
    than they are. Counts and single roundings, so that kernels find what torch finds.
    """
    half = chosen.scale * (chosen.top / 2)
    to_end = ((x - chosen.zero_point - half).abs() - half).abs()
    at_end = (to_end <= eta * half) & mask
    elements = mask.sum(-1, keepdim=True)
    return (2 * at_end.sum(-1, keepdim=True) > elements) & (elements >= LEAST_KEPT)


def _with_gain(
    x: Tensor,
    codes: Tensor | None,
    mask: Tensor,
    spec: TensorSpec,
    scale: Tensor,
    zero_point: Tensor,
) -> tuple[Tensor, Tensor]:
    """Scale the levels about the mean, by energy and then by the gain; codes stay."""
    if not needs_codes(spec):
        return scale, zero_point
    mean = masked_mean(x, mask)
    x, offset = (x - mean) * mask, zero_point - mean
    if spec.energy:
        gain = energy_gain(x, (codes * scale + offset) * mask, spec.energy)
        scale, offset = gain * scale, gain * offset
    gain = spec.gain
    if gain == "fit":
        gain = fitted_gain(x, (codes * scale + offset) * mask)
    return stored(gain * scale, spec), stored(mean + gain * offset, spec)


def _power_about_mean(x: Tensor, mask: Tensor, spec: TensorSpec) -> Tensor:
    """Cost of a channel's error, [..., blocks, channels], which orders the classes."""
    centred = (x - masked_mean(x, mask)) * mask
    return (energy_weights(centred, spec.energy) * centred.square()).sum(-1)


def _unsorted(rows: Tensor, order: Tensor) -> Tensor:
    return torch.empty_like(rows).scatter_(-2, order.expand_as(rows), rows)


def _range(x: Tensor, mask: Tensor, spec: TensorSpec, bits: int) -> tuple[Tensor, Tensor]:
    """(scale, zero_point) between end points; at 0 bits (0, mean)."""
    if not bits:
        mean = stored(masked_mean(x, mask), spec)
        return torch.zeros_like(mean), mean
    if spec.ends == "deviations":
        scale, zero_point = deviation_range(x, mask)
    elif spec.levels == "lloyd":
        scale, zero_point = lloyd_range(x, mask, bits)
    else:
        scale, zero_point = uniform_range(x, mask, bits, spec.shrink)
    scale, zero_point = stored(scale, spec), stored(zero_point, spec)
    return scale, zero_point if spec.grid == "free" else on_grid(scale, zero_point, spec)


def on_grid(scale: Tensor, zero_point: Tensor, spec: TensorSpec) -> Tensor:
    """Zero-points moved to whole numbers of steps, half to even; a group without width stays."""
    steps = (zero_point / torch.where(scale > 0, scale, 1.0)).round()
    return torch.where(scale > 0, stored(steps * scale, spec), zero_point)
