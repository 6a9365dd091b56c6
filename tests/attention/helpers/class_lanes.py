"""`class_decode.cu` in numpy: what each of a warp's 32 lanes does with one tile of a record.

Indices, registers and bytes are the kernel's; only the exponentials' maximum is known beforehand.
"""

from __future__ import annotations

import numpy as np

from duotone.attention.cuda.classes.format import COLUMN, Classes, ClassFormat

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4
BIAS, Q_TOP, PLAIN_TOP, P_TOP = 12582912.0, 32639.0, 16.0, 15.999
BOTH_BIASES = 12632064.0


def power_in(n: int, most: int) -> int:
    power = 1
    while power < most and n % (2 * power) == 0:
        power *= 2
    return power


class Side:
    """`Classes` of class_codes.cuh: the bits, words and places of columns."""

    def __init__(self, classes: Classes) -> None:
        self.bits, self.within, self.of_class, self.first_word = [], [], [], []
        word = 0
        for (bits, _), columns in zip(classes.sizes, classes.columns, strict=True):
            self.bits += [bits] * columns
            self.within += range(columns)
            self.of_class += [columns] * columns
            self.first_word += [word] * columns
            word += bits * columns
        self.words, self.columns = word, len(self.bits)

    def register(self, words: np.ndarray, column: int, row: int, place: int) -> np.ndarray:
        """Register `row` of a column, of all lanes: four codes in bytes, `place` bits up."""
        bits, per_byte = self.bits[column], 8 // self.bits[column]
        e = row * self.of_class[column] + self.within[column]
        mask = (((1 << bits) - 1) << place) * 0x01010101
        shift = e % per_byte * bits - place
        assert shift >= 0
        return (words[self.first_word[column] + e // per_byte] >> shift) & mask

    def key_place(self, column: int) -> int:
        bits = self.bits[column]
        return self.within[column] % power_in(self.of_class[column], 4 // bits) * bits

    def value_place(self, column: int, half: int) -> int:
        bits, columns = self.bits[column], self.of_class[column]
        within = half * columns + self.within[column]
        return within % power_in(2 * columns, 8 // bits) * bits


def load_words(raw: bytes, count: int) -> np.ndarray:
    """[words, lanes], as `load_words` of common.cuh."""
    unit = 4 if count % 4 == 0 else 1 if count % 2 else 2
    words = np.frombuffer(raw[: count * 128], "<u4").astype(np.int64)
    i = np.arange(count)[:, None]
    return words[i // unit * 32 * unit + LANES * unit + i % unit]


def bytes_of(register: np.ndarray, signed: bool) -> np.ndarray:
    """[lanes, 4]."""
    parts = (register[:, None] >> (8 * np.arange(4))) & 255
    return np.where(parts > 127, parts - 256, parts) if signed else parts


def mma(a: list[np.ndarray], b: list[np.ndarray], signed: bool) -> np.ndarray:
    """m16n8k32 (or k16: half of both), codes by digits: c0 to c3 of every lane, [4, lanes]."""
    left, right = np.zeros((16, 32), np.int64), np.zeros((32, 8), np.int64)
    j = np.arange(4)
    for i, register in enumerate(a):
        left[(G + 8 * (i % 2))[:, None], 16 * (i // 2) + 4 * T[:, None] + j] = bytes_of(
            register, False
        )
    for i, register in enumerate(b):
        right[16 * i + 4 * T[:, None] + j, G[:, None]] = bytes_of(register, signed)
    c = left @ right
    return np.stack([c[G, 2 * T], c[G, 2 * T + 1], c[G + 8, 2 * T], c[G + 8, 2 * T + 1]])


def byte_perm(x: np.ndarray, y: np.ndarray, pick: np.ndarray | int) -> np.ndarray:
    both = x | (y << 32)
    out = np.zeros_like(both)
    for i in range(4):
        nibble = (np.asarray(pick) >> (4 * i)) & 7
        out |= ((both >> (8 * nibble)) & 255) << (8 * i)
    return out


def transpose8x8(x: np.ndarray) -> np.ndarray:
    matrix = np.zeros((8, 8), np.int64)
    matrix[G, 2 * T], matrix[G, 2 * T + 1] = x & 0xFFFF, x >> 16
    return matrix[2 * T, G] | (matrix[2 * T + 1, G] << 16)


def float_bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32).view(np.uint32).astype(np.int64)


def fold(raw: bytes, form: ClassFormat, table: np.ndarray, side: Side) -> list[np.ndarray]:
    """Digits of q in every column. table: [channels, 4], q of 4 heads as integers per scale."""
    scales_at = sum(form.parts[:3])
    channels_at = scales_at + form.parts[3]
    half = 4 * T + 2 * (G & 1)
    pick = np.where(G & 1, 0x3276, 0x5410)
    scales, channels = np.frombuffer(raw, np.float16), np.frombuffer(raw, np.uint8)
    digits = []
    for column in range(side.columns):
        at = channels_at + 16 * column + half
        place = (scales_at + 32 * column + 2 * half) // 2
        one = (BIAS + 128) * (1 << side.key_place(column))
        folded = [
            float_bits(table[channels[at + i], G >> 1] * scales[place + i].astype(float) + one)
            for i in range(2)
        ]
        own = byte_perm(*folded, 0x4051) ^ 0x80800000
        digits.append(byte_perm(own, own[LANES ^ 4], pick))
    return digits


def span_digits(folded: np.ndarray, side: Side) -> list[np.ndarray]:
    """Digits of q in every column. folded: [4 heads, places], at most Q_TOP."""
    digits = []
    for column in range(side.columns):
        place = 16 * column + 4 * T
        four = [
            float_bits(folded[G >> 1, place + i] / (1 << side.key_place(column)) + BIAS)
            for i in range(4)
        ]
        odd = (G & 1).astype(bool)
        pick = np.where(odd, 0x0040, 0x0051)
        x = [v + np.where(odd, 0, 128) for v in four]
        digits.append(byte_perm(byte_perm(*x[:2], pick), byte_perm(*x[2:], pick), 0x5410))
    return digits


def scores(raw: bytes, form: ClassFormat, digits: list[np.ndarray], side: Side) -> np.ndarray:
    """Integer products, [8, lanes]: keys 16 (x / 2) + 8 (x % 2) + g, q head t."""
    words, out = load_words(raw, side.words), np.zeros((8, 32))
    for sub in range(4):
        c = np.zeros((4, 32), np.int64)
        for column in range(0, side.columns, 2):
            pair = range(column, min(column + 2, side.columns))
            a = [
                side.register(words, r, 2 * sub + i, side.key_place(r))
                for r in pair
                for i in (0, 1)
            ]
            c += mma(a, [digits[r] for r in pair], True)
        assert (abs(c) < 1 << 22).all()
        biased = BIAS + c.astype(float)
        out[2 * sub] = (biased[0] - BOTH_BIASES) * 256 + biased[1]
        out[2 * sub + 1] = (biased[2] - BOTH_BIASES) * 256 + biased[3]
    return out


def zero_scores(raw: bytes, form: ClassFormat, query: np.ndarray) -> np.ndarray:
    """q times the zero-points, of q head t in every lane. query: [4, channels], at most 16."""
    zeros_at = sum(form.parts[:2])
    plain = np.zeros((form.channels // 16, 4, 4, 8), np.float16)
    for i in range(form.channels // 32):
        for c in range(32):
            for h in range(4):
                x = query[h, 32 * i + c]
                word = c & 2
                row = plain[2 * i + (c >> 2 & 1), h, c >> 3]
                row[2 * word + (c & 1)] = x
                row[2 * word + 2 + (c & 1)] = x - np.float16(x).astype(float)
    sums = np.zeros((16, 8))
    zeros = np.frombuffer(raw, np.float16)
    j = np.arange(2)
    for i in range(form.channels // 32):
        at = (zeros_at + 64 * i + 16 * T) // 2
        for s in range(2):
            left, right = np.zeros((16, 16)), np.zeros((16, 8))
            a = plain[2 * i + s, G % 4, T].reshape(32, 4, 2)
            for r in range(4):
                left[(G + 8 * (r % 2))[:, None], 8 * (r // 2) + 2 * T[:, None] + j] = a[:, r]
            for w in range(2):
                index = at + 4 * s + 2 * w
                right[8 * w + 2 * T[:, None] + j, G[:, None]] = zeros[index[:, None] + j]
            sums += left @ right
    both = sums[G, 2 * T] + sums[G + 8, 2 * T]
    return both[4 * T]


def value_sums(raw: bytes, form: ClassFormat, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sums of weight * code [4 heads, places], sums of weights). weights: integers, [8, lanes]."""
    side = Side(form.value)
    words = load_words(raw[form.parts[0] :], side.words)
    sums = np.zeros((side.columns, 4, 32))
    total = np.zeros((4, 32))
    for u in range(2):
        p = [
            transpose8x8(byte_perm(weights[4 * u + i], weights[4 * u + 2 + i], 0x4051))
            for i in range(2)
        ]
        total += mma([np.full(32, 0x01010101)] * 4, p, False)
        for column in range(side.columns):
            a = [
                side.register(words, column, 4 * u + i, side.value_place(column, i % 2))
                for i in range(4)
            ]
            sums[column] += mma(a, p, False)
    out = np.zeros((4, side.columns * COLUMN))
    for column in range(side.columns):
        for half in range(2):
            digits = sums[column, 2 * half : 2 * half + 2]
            at = 16 * column + 8 * half + G
            out[T, at] = (digits[0] * 256 + digits[1]) / (1 << side.value_place(column, half))
    heads = np.zeros(4)
    heads[T] = total[0] * 256 + total[1]
    return out, heads
