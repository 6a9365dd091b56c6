"""The quantized weight of one linear layer: codes, scales, and the column that stays 16 bit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

BITS = (4, 8)
# Codes are symmetric; the int32 sums of a kernel hold 2^31 / (127 * 128) products of such codes,
# also where it keeps 4-bit codes times 16.
MAX_IN = (1 << 31) // (127 * 128)


@dataclass(frozen=True)
class PackedWeight:
    """Symmetric integer codes of a weight [out, in], as nn.Linear has it.

    codes: int8 [out, in] for 8 bits; for 4 bits uint8 [out, in / 2], two's complement nibbles, the
        even column in the low nibble.
    scale: float32 [out], or [out, in / group_size] with groups along `in`; w ~ codes * scale.
    w0: [out] floating point or None: column 0 of the weight where RMS splits it off; the codes of
        that column are then 0.
    Errors: ValueError for dtypes and shapes that do not fit together, and for codes or scales that
        are not contiguous.
    """

    codes: Tensor
    bits: int
    scale: Tensor
    group_size: int | None = None
    w0: Tensor | None = None

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits must be one of {BITS}; got {self.bits}")
        wanted = torch.uint8 if self.bits == 4 else torch.int8
        if self.codes.dim() != 2 or self.codes.dtype != wanted:
            raise ValueError(
                f"codes of {self.bits} bits must be a matrix of {wanted}; got "
                f"{tuple(self.codes.shape)} of {self.codes.dtype}"
            )
        self._check_scale()
        for name in ("codes", "scale"):
            if not getattr(self, name).is_contiguous():
                raise ValueError(
                    f"{name} must be contiguous, as kernels read it; call .contiguous()"
                )
        if self.w0 is not None and self.w0.shape != self.codes.shape[:1]:
            raise ValueError(f"w0 must be [out] = [{len(self.codes)}]; got {tuple(self.w0.shape)}")

    def _check_scale(self) -> None:
        rows, columns = self.shape
        if columns > MAX_IN:
            raise ValueError(f"int32 sums hold at most {MAX_IN} columns; got {columns}")
        if self.group_size is not None and (self.group_size < 1 or columns % self.group_size):
            raise ValueError(
                f"group_size must divide the {columns} columns; got {self.group_size}; "
                "pad the weight or leave groups out"
            )
        wanted = (rows,) if self.group_size is None else (rows, columns // self.group_size)
        if tuple(self.scale.shape) != wanted or self.scale.dtype != torch.float32:
            raise ValueError(
                f"scale must be float32 {wanted}; got {self.scale.dtype} {tuple(self.scale.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)."""
        rows, columns = self.codes.shape
        return rows, columns * 8 // self.bits

    def rows(self, part: slice) -> PackedWeight:
        """The channels of `part`, a view."""
        w0 = None if self.w0 is None else self.w0[part]
        return replace(self, codes=self.codes[part], scale=self.scale[part], w0=w0)

    def unpacked(self) -> Tensor:
        """The codes as int8 [out, in]."""
        return unpack_int4(self.codes) if self.bits == 4 else self.codes

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight [out, in] that the codes stand for, the split column put back."""
        scale = self.scale[:, None]
        if self.group_size is not None:
            scale = self.scale.repeat_interleave(self.group_size, 1)
        weight = self.unpacked().float() * scale
        if self.w0 is not None:
            weight[:, 0] = self.w0.float()
        return weight.to(dtype)

    def to(self, device: torch.device | str) -> PackedWeight:
        """Copy to `device`."""
        w0 = None if self.w0 is None else self.w0.to(device)
        return replace(self, codes=self.codes.to(device), scale=self.scale.to(device), w0=w0)


def pack_int4(codes: Tensor) -> Tensor:
    """int8 [out, in] in [-8, 7] -> uint8 [out, in / 2]: byte j is column 2j + 16 * column 2j+1.

    Errors: ValueError for another dtype, an odd `in`, or codes out of range.
    """
    if codes.dtype != torch.int8 or codes.dim() != 2 or codes.shape[1] % 2:
        raise ValueError(
            "int4 packing takes an int8 matrix with an even number of columns; got "
            f"{tuple(codes.shape)} of {codes.dtype}; pad it with a column of zeros"
        )
    if codes.numel() and (codes.min() < -8 or codes.max() > 7):
        raise ValueError(f"int4 codes lie in [-8, 7]; got [{int(codes.min())}, {int(codes.max())}]")
    nibbles = codes.view(torch.uint8) & 15
    return nibbles[:, ::2] | (nibbles[:, 1::2] << 4)


def unpack_int4(packed: Tensor) -> Tensor:
    """The inverse of `pack_int4`: uint8 [out, in / 2] -> int8 [out, in].

    Errors: ValueError for another dtype or shape.
    """
    if packed.dtype != torch.uint8 or packed.dim() != 2:
        raise ValueError(
            f"packed int4 is a matrix of uint8; got {tuple(packed.shape)} of {packed.dtype}"
        )
    # The shift left moves a nibble to the sign's bits; the arithmetic one back extends the sign.
    both = torch.stack((packed << 4, packed & 0xF0), -1)
    return both.flatten(1).view(torch.int8) >> 4
