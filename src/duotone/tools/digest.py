"""Digests of tensors, computed on their own device, equal on every device.

A tensor is read as 64-bit words w_i, the last one filled up with zeros. Its sum is, modulo 2^64,

    sum_i  f(w_i xor (G * i)),    f: the finalizer of splitmix64

f is a bijection, so a change within one word is always seen. It mixes all bits with all others:
changes of two words cancel once in about 2^64. Integer sums have no order: threads and devices
agree. A name, a type and a shape go with each sum into a BLAKE2b digest. The digest finds damage
and differences; it is no signature against forgers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

WORD = 8  # bytes
# Words per pass: few enough for a CPU's cache, enough to keep a GPU busy.
CHUNK = {"cpu": 1 << 17}
LARGE_CHUNK = 1 << 23
# Odd constants of splitmix64, as signed integers.
G, M1, M2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


def digest(tensors: Mapping[str, Tensor], data: Any = None) -> str:
    """32 hexadecimal digits of the names, types, shapes and bytes of `tensors`, and of `data`.

    data: JSON-safe. The order of names does not matter.
    """
    found = blake2b(digest_size=16)
    found.update(json.dumps(data, sort_keys=True).encode())
    sums = _on_host({name: word_sum(tensor) for name, tensor in tensors.items()})
    for name in sorted(tensors):
        tensor = tensors[name]
        kind = str(tensor.dtype).removeprefix("torch.")
        found.update(json.dumps([name, kind, list(tensor.shape), sums[name]]).encode())
    return found.hexdigest()


def word_sum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's mixed words: int64, without axes, on its device."""
    data = tensor.detach().contiguous().flatten().view(torch.uint8)
    size = CHUNK.get(data.device.type, LARGE_CHUNK)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    longest = min(size, -(-len(data) // WORD))
    places = torch.arange(longest, device=data.device).mul_(G)
    for start in range(0, len(data), size * WORD):
        words = _words(data[start : start + size * WORD])
        total += _mixed(words, places[: len(words)] + _wrapped(G * (start // WORD))).sum()
    return total


def _words(data: Tensor) -> Tensor:
    missing = -len(data) % WORD
    if missing:
        data = torch.nn.functional.pad(data, (0, missing))
    elif data.data_ptr() % WORD or data.storage_offset() % WORD:
        data = data.clone()
    return data.view(torch.int64)


def _mixed(words: Tensor, mixed: Tensor) -> Tensor:
    """f of words and `mixed`, their places times G, which is overwritten."""
    mixed.bitwise_xor_(words)
    shifted = torch.empty_like(mixed)
    _fold(mixed, 30, shifted).mul_(M1)
    _fold(mixed, 27, shifted).mul_(M2)
    return _fold(mixed, 31, shifted)


def _fold(x: Tensor, bits: int, shifted: Tensor) -> Tensor:
    """x xor (x >> bits), the shift of unsigned numbers; in place."""
    torch.bitwise_right_shift(x, bits, out=shifted)
    return x.bitwise_xor_(shifted.bitwise_and_((1 << (64 - bits)) - 1))


def _wrapped(number: int) -> int:
    """A number modulo 2^64, as a signed integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _on_host(sums: Mapping[str, Tensor]) -> dict[str, int]:
    """Copy all sums to the host, with one transfer per device."""
    found: dict[str, int] = {}
    for device in {total.device for total in sums.values()}:
        names = [name for name, total in sums.items() if total.device == device]
        found |= zip(names, torch.stack([sums[n] for n in names]).tolist(), strict=True)
    return found
