"""Classes of channels: how many channels get how many bits, and which ones.

The spec fixes the counts. Each block chooses its channels by the cost of their errors: their
variance, weighted as the spec says. A block stores one class number per channel (2
bits). Inside a class channels keep their order, so

    class numbers  1 3 0 3 3 1 3 2      order  2 | 0 5 | 7 | 1 3 4 6
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from duotone.quant.packing import pack, packed_bytes, unpack
from duotone.quant.spec import TensorSpec
from duotone.tools.kept import cached_once, kept

CLASS_BITS = 2


def class_counts(spec: TensorSpec, channels: int) -> list[tuple[int, int]]:
    """[(bits, channels of that class)] in order, the class of 0 bits last.

    Errors: ValueError if a share is not a whole number of channels.
    """
    counts = [(bits, share * channels) for bits, share in spec.classes or ()]
    for bits, count in counts:
        if abs(count - round(count)) > 1e-6:
            raise ValueError(
                f"shares of classes must give whole channels; {spec.classes} of {channels} "
                f"channels gives {count:g} channels of {bits} bits."
            )
    whole = [(bits, round(count)) for bits, count in counts]
    return [*whole, (0, channels - sum(count for _, count in whole))]


def coded_channels(spec: TensorSpec, channels: int) -> int:
    """Number of channels that have codes, and so a scale."""
    return sum(count for bits, count in class_counts(spec, channels) if bits)


def assign_classes(
    variance: Float[Tensor, "*b channels"], spec: TensorSpec
) -> UInt8[Tensor, "*b channels"]:
    """Class number of every channel: the largest variance first, ties by channel number.

    variance: cost of leaving a channel to its mean; see `TensorSpec.energy`.
    """
    counts = class_counts(spec, variance.shape[-1])
    ranks = [number for number, (_, count) in enumerate(counts) for _ in range(count)]
    by_rank = on_device(tuple(ranks), variance.device)
    ranked = variance.argsort(dim=-1, descending=True, stable=True)
    numbers = torch.empty_like(ranked).scatter_(-1, ranked, by_rank.expand_as(ranked))
    return numbers.to(torch.uint8)


def class_widths(spec: TensorSpec, channels: int, device: torch.device) -> Int[Tensor, " classes"]:
    """Bits of every class, by its number."""
    return on_device(tuple(bits for bits, _ in class_counts(spec, channels)), device)


@cached_once
def on_device(numbers: tuple[int, ...], device: torch.device) -> Int[Tensor, " numbers"]:
    """Whole numbers as a tensor, kept per device: a captured step copies nothing."""
    return kept(lambda: torch.tensor(numbers, device=device), device)


def class_order(numbers: UInt8[Tensor, "*b channels"]) -> Int[Tensor, "*b channels"]:
    """Channels sorted by class: slot i of the packed order holds channel order[i]."""
    return numbers.argsort(dim=-1, stable=True)


def pack_classes(
    codes: UInt8[Tensor, "*b channels"], spec: TensorSpec
) -> UInt8[Tensor, "*b bytes"]:
    """Pack codes that are sorted by class, each class at its own width, one after the other."""
    counts = class_counts(spec, codes.shape[-1])
    parts = codes.split([count for _, count in counts], -1)
    packed = [pack(part, bits) for part, (bits, _) in zip(parts, counts, strict=True) if bits]
    return torch.cat(packed, -1)


def unpack_classes(
    words: UInt8[Tensor, "*b bytes"], spec: TensorSpec, channels: int
) -> UInt8[Tensor, "*b {channels}"]:
    """Inverse of `pack_classes`; channels of 0 bits have code 0."""
    counts = class_counts(spec, channels)
    widths = [packed_bytes(count, bits) for bits, count in counts if bits]
    parts = zip(words.split(widths, -1), counts[:-1], strict=True)
    codes = [unpack(part, bits, count) for part, (bits, count) in parts]
    empty = codes[0].new_zeros(*words.shape[:-1], counts[-1][1])
    return torch.cat([*codes, empty], -1)
