"""Round to nearest: symmetric integer codes of a weight, with or without a search for the clip.

    w ~ scale * clamp(round(w / scale), low, high)     per output channel, or per group along `in`

int8: [-127, 127]; int4: [-8, 7]. The clip search shrinks the range of a channel until the error of
its codes is least. Where moments of the inputs are given, the output's error is minimised. The norm
is 2.4 as in GPTQ's and QuaRot's code, which take 100 steps down to 0.2; here 40 steps go down to
0.5.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.weights.modules.packed_weight import BITS, PackedWeight, pack_int4

CLIP_NORM = 2.4
CLIP_STEPS = 40
CLIP_SMALLEST = 0.5


def code_range(bits: int) -> tuple[int, int]:
    """(lowest, highest) code. Errors: ValueError for another width than 4 or 8."""
    if bits not in BITS:
        raise ValueError(f"weights have {BITS} bits, got {bits}")
    return (-8, 7) if bits == 4 else (-127, 127)


def grouped(weight: Tensor, group: int | None) -> Tensor:
    """[out, in] -> [out, groups, columns of a group]. Errors: ValueError where it does not fit."""
    columns = weight.shape[1]
    size = group or columns
    if columns % size:
        raise ValueError(
            f"a group must divide the {columns} input channels, got {group}; pad the weight, or "
            "use one scale per output channel (group None)"
        )
    return weight.unflatten(1, (-1, size))


def padded(weight: Tensor, group: int | None) -> Tensor:
    """Zero columns up to whole groups, and to an even number that int4 can be packed in."""
    return F.pad(weight, (0, -weight.shape[1] % (group or 2)))


def weight_scale(
    weight: Tensor,
    bits: int,
    group: int | None = None,
    clip: bool = False,
    moments: Tensor | None = None,
) -> Tensor:
    """float32 [out], or [out, in / group]: the largest magnitude over the highest code.

    clip: the range of least error of the rounded weights instead. With second moments [in, in] of
    the inputs: of least error that a channel's or group's weights make in the output. Zeros get the
    scale 1.
    """
    parts = grouped(weight.float(), group)
    largest = parts.abs().amax(-1)
    full = torch.where(largest > 0, largest, 1.0) / code_range(bits)[1]
    error = _weight_error if moments is None else _output_error(moments.float(), parts.shape[-1])
    scale = _least_error(parts, full, bits, error) if clip else full
    return scale[:, 0] if group is None else scale


def _weight_error(wrong: Tensor) -> Tensor:
    return wrong.abs_().pow_(CLIP_NORM).sum(-1)


def _output_error(moments: Tensor, size: int) -> Callable[[Tensor], Tensor]:
    """|| d X_g ||^2 of deviations d [out, groups, size], one group of inputs at a time."""
    starts = range(0, len(moments), size)
    blocks = torch.stack([moments[i : i + size, i : i + size] for i in starts])

    def error(wrong: Tensor) -> Tensor:
        return ((wrong.transpose(0, 1) @ blocks).transpose(0, 1) * wrong).sum(-1)

    return error


def _least_error(
    parts: Tensor, full: Tensor, bits: int, error_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """Best of CLIP_STEPS shrunken scales [out, groups], for each row and group."""
    best, least = full, torch.full_like(full, torch.inf)
    for step in range(CLIP_STEPS):
        scale = full * (1 - step * (1 - CLIP_SMALLEST) / CLIP_STEPS)
        wrong = rounded(parts, scale[..., None], bits).mul_(scale[..., None]).sub_(parts)
        error = error_of(wrong)
        best = torch.where(error < least, scale, best)
        least = torch.minimum(error, least)
    return best


def rounded(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Codes as floating point: clamp(round(weight / scale)), halves to even."""
    return (weight / scale).round().clamp(*code_range(bits))


def packed(codes: Tensor, scale: Tensor, bits: int, w0: Tensor | None = None) -> PackedWeight:
    """Codes [out, in] of any type -> their storage. `w0`: the column that is stored separately."""
    group = None if scale.dim() == 1 else codes.shape[1] // scale.shape[1]
    codes = codes.to(torch.int8).contiguous()
    return PackedWeight(
        pack_int4(codes) if bits == 4 else codes, bits, scale.float().contiguous(), group, w0
    )


def column_scales(scale: Tensor, columns: int) -> Tensor:
    """Scales [out] or [out, groups] -> [out, in]."""
    if scale.dim() == 1:
        return scale[:, None].expand(-1, columns)
    return scale.repeat_interleave(columns // scale.shape[1], 1)


def round_to_nearest(
    weight: Tensor,
    bits: int,
    group: int | None = None,
    clip: bool = False,
    moments: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(codes [out, in] as float32, scale float32 [out] or [out, groups]); `weight_scale`'s clip."""
    scale = weight_scale(weight, bits, group, clip, moments)
    per_part = scale[:, None, None] if group is None else scale[..., None]
    return rounded(grouped(weight.float(), group), per_part, bits).flatten(1), scale
