"""Digits of q in the lanes of a warp, in numpy: indices, registers and bytes of the kernel."""

from __future__ import annotations

import numpy as np

from duotone.attention.cuda.classes.format import Classes

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4
BIAS, Q_TOP = 12582912.0, 32639.0


def power_in(n: int, most: int) -> int:
    power = 1
    while power < most and n % (2 * power) == 0:
        power *= 2
    return power


class Side:
    """`Classes` of classes/codes.cuh: the bits of columns and where they lie in a class."""

    def __init__(self, classes: Classes) -> None:
        self.bits, self.within, self.of_class, self.halves = [], [], [], []
        for (bits, n), columns in zip(classes.sizes, classes.columns, strict=True):
            half = bits > 1 and 0 < n % 16 <= 8  # a class by itself, at bit 0
            self.bits += [bits] * columns
            self.within += [*range(columns - half), *[0] * half]
            self.halves += [False] * (columns - half) + [True] * half
            self.of_class += [columns - half] * (columns - half) + [1] * half
        self.columns = len(self.bits)

    def key_bit(self, column: int) -> int:
        bits = self.bits[column]
        return self.within[column] % power_in(self.of_class[column], 4 // bits) * bits

    def value_bit(self, column: int, half: int) -> int:
        if self.halves[column]:
            return 0
        bits, columns = self.bits[column], self.of_class[column]
        within = half * columns + self.within[column]
        return within % power_in(2 * columns, 8 // bits) * bits


def bytes_of(register: np.ndarray, signed: bool) -> np.ndarray:
    """[lanes, 4]."""
    parts = (register[:, None] >> (8 * np.arange(4))) & 255
    return np.where(parts > 127, parts - 256, parts) if signed else parts


def byte_perm(x: np.ndarray, y: np.ndarray, pick: np.ndarray | int) -> np.ndarray:
    both = x | (y << 32)
    out = np.zeros_like(both)
    for i in range(4):
        nibble = (np.asarray(pick) >> (4 * i)) & 7
        out |= ((both >> (8 * nibble)) & 255) << (8 * i)
    return out


def float_bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).view(np.uint32).astype(np.int64)


def span_digits(folded: np.ndarray, side: Side) -> list[np.ndarray]:
    """Digits of q in every column. folded: [4 heads, places], at most Q_TOP."""
    digits = []
    for column in range(side.columns):
        place = 16 * column + 4 * T
        four = [
            float_bits(folded[G >> 1, place + i] / (1 << side.key_bit(column)) + BIAS)
            for i in range(4)
        ]
        odd = (G & 1).astype(bool)
        pick = np.where(odd, 0x0040, 0x0051)
        x = [v + np.where(odd, 0, 128) for v in four]
        digits.append(byte_perm(byte_perm(*x[:2], pick), byte_perm(*x[2:], pick), 0x5410))
    return digits
