"""Canonical packing of codes into bytes (CalibQuant A.1): big-endian inside each byte.

    bits=1   byte  c0 c1 c2 c3 c4 c5 c6 c7      element i is shifted left by 8 - bits * (1 + i)
    bits=2   byte  c0c0 c1c1 c2c2 c3c3
    bits=4   byte  c0c0c0c0 c1c1c1c1
    bits=8   byte  c0
    bits=3   bytes c0c0c0c1 c1c1c2c2 | c2c3c3c3 c4c4c4c5 | ...: 8 codes in 3 bytes, bit by bit

The last byte of a row is filled up with zeros. This is the serialized layout; a kernel may own
another layout and converts with exact inverses.
"""

from __future__ import annotations

import torch
from jaxtyping import UInt8
from torch import Tensor

from duotone.quant.checks import checked
from duotone.quant.tensor_spec import BITS


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"bits must be one of {BITS}; got {bits!r}.")


def _shifts(word: int, bits: int, device: torch.device) -> Tensor:
    """Shifts of pieces of `bits` bits of a word, the top piece first."""
    return torch.arange(word - bits, -1, -bits, dtype=torch.uint8, device=device)


def packed_bytes(n: int, bits: int) -> int:
    """Bytes that `n` codes of `bits` bits take."""
    return -(-n * bits // 8)


def pack(codes: UInt8[Tensor, "*b n"], bits: int) -> UInt8[Tensor, "*b bytes"]:
    """Pack codes in 0..2**bits - 1 along the last axis. Errors: a code that does not fit."""
    _check_bits(bits)
    if checked() and codes.numel() and int(codes.max()) >= 1 << bits:
        raise ValueError(
            f"codes of {bits} bits must lie in 0..{(1 << bits) - 1}; got {int(codes.max())}."
        )
    if 8 % bits:
        return pack(split_bits(codes, bits), 1)
    per_byte, n = 8 // bits, codes.shape[-1]
    fill = packed_bytes(n, bits) * per_byte - n
    codes = torch.nn.functional.pad(codes, (0, fill)).unflatten(-1, (-1, per_byte))
    return (codes << _shifts(8, bits, codes.device)).sum(-1, dtype=torch.uint8)


def unpack(words: UInt8[Tensor, "*b bytes"], bits: int, n: int) -> UInt8[Tensor, "*b {n}"]:
    """Inverse of `pack`: the first `n` codes of each row. Errors: a row that is too short."""
    _check_bits(bits)
    if packed_bytes(n, bits) != words.shape[-1]:
        raise ValueError(
            f"{n} codes of {bits} bits take {packed_bytes(n, bits)} bytes; "
            f"got rows of {words.shape[-1]}. Check bits and n."
        )
    if 8 % bits:
        return join_bits(unpack(words, 1, n * bits), bits)
    shifts, mask = _shifts(8, bits, words.device), (1 << bits) - 1
    return ((words.unsqueeze(-1) >> shifts) & mask).flatten(-2)[..., :n]


def split_bits(codes: UInt8[Tensor, "*b n"], bits: int) -> UInt8[Tensor, "*b n_bits"]:
    """Single bits of codes, the top bit first: big-endian as well."""
    return ((codes.unsqueeze(-1) >> _shifts(bits, 1, codes.device)) & 1).flatten(-2)


def join_bits(single: UInt8[Tensor, "*b n_bits"], bits: int) -> UInt8[Tensor, "*b n"]:
    """Inverse of `split_bits`."""
    rows = single.unflatten(-1, (-1, bits))
    return (rows << _shifts(bits, 1, single.device)).sum(-1, dtype=torch.uint8)
