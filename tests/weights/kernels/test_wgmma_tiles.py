"""Tiles of warpgroup products: what fits the chip, what is chosen, what is refused."""

import ctypes
import math

import pytest
import torch

from duotone.weights.kernels.cuda import wgmma_gemm
from duotone.weights.kernels.cuda.wgmma_gemm import (
    Arguments,
    gemm_wgmma,
    macros_of,
    missing,
    unsupported,
)
from duotone.weights.kernels.cuda.wgmma_tiles import (
    SHARED_BYTES,
    TURN_BYTES,
    WgmmaTile,
    best_tile,
    predicted_us,
)
from duotone.weights.modules.linear import linear_int
from duotone.weights.modules.packed_weight import PackedWeight

SHAPES = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (64, 4304), (72, 16)]
TOKENS = [1, 2, 63, 64, 100, 111, 153, 257, 477, 1000, 8192]
SMS = 132


def weight(outs: int, ins: int, group: int | None = None) -> PackedWeight:
    scale = torch.ones(outs) if group is None else torch.ones(outs, ins // group)
    return PackedWeight(torch.zeros(outs, ins, dtype=torch.int8), 8, scale, group)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tokens", TOKENS)
def test_what_is_chosen_fits_the_chip(tokens: int, shape: tuple[int, int]) -> None:
    tile = best_tile(tokens, *shape, SMS)
    assert tile.tokens % 16 == 0
    assert 16 <= tile.tokens <= 256  # the most that one warpgroup product takes
    assert tile.outs <= shape[0]
    # sums of a thread, within what it may have and what the assembler takes in one instruction
    registers = wgmma_gemm.REGISTERS[tile.groups]
    assert tile.rows * tile.tokens // 2 + 24 <= registers
    assert tile.tokens // 2 + 26 <= 65536 // ((tile.groups + 1) * 128)
    assert tile.stages >= 2
    assert tile.stages * tile.step_bytes + tile.groups * TURN_BYTES <= SHARED_BYTES


@pytest.mark.parametrize("channels", [64, 72, 3072, 14336, 16384, 18944])
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_gate_has_tiles_of_its_own(tokens: int, channels: int) -> None:
    tile = best_tile(tokens, 2 * channels, 4096, SMS, gated=True)
    assert tile.rows == 2
    assert tile.outs // 2 <= channels
    assert tile.tokens + 24 <= wgmma_gemm.REGISTERS[tile.groups]
    plain = best_tile(tokens, 2 * channels, 4096, SMS)
    times = [
        predicted_us(t, tokens, 2 * channels, 4096, SMS, gated)
        for t, gated in ((tile, True), (plain, False))
    ]
    # An activation costs about what a number that is not written did; tiny weights have few tiles.
    assert times[0] <= times[1] * (1.2 if channels > 1024 else 1.6)


def test_no_rows_are_wasted_where_one_round_has_them_all() -> None:
    assert best_tile(153, 32768, 6144, SMS).tokens == 160
    assert best_tile(477, 4096, 14336, SMS).tokens == 240


@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_more_tokens_take_longer(shape: tuple[int, int]) -> None:
    times = [predicted_us(best_tile(t, *shape, SMS), t, *shape, SMS) for t in TOKENS]
    assert all(math.isfinite(time) and time > 0 for time in times)
    assert times == sorted(times)


def test_never_faster_than_the_memory_or_the_tensor_cores() -> None:
    outs, ins = 28672, 4096
    for tokens in TOKENS:
        us = predicted_us(best_tile(tokens, outs, ins, SMS), tokens, outs, ins, SMS)
        assert us >= outs * ins / 4.8e6
        assert us >= tokens * outs * ins / (4096 * SMS * 1980)


@pytest.mark.parametrize(
    ("shape", "group", "words"),
    [
        ((56, 4096), None, "64 at least"),
        ((100, 4096), None, "multiples of 8"),
        ((128, 4104), None, "multiples of 16"),
        ((128, 4096), 128, "groups of columns"),
    ],
)
def test_what_it_cannot_multiply(shape: tuple[int, int], group: int | None, words: str) -> None:
    assert words in (unsupported(weight(*shape, group)) or "")
    assert unsupported(weight(128, 4096)) is None


def test_without_such_a_device_it_says_so() -> None:
    assert "CUDA device" in (missing(torch.device("cpu")) or "")
    with pytest.raises(ValueError, match="cannot run this: warpgroup products need a CUDA device"):
        linear_int(
            torch.zeros(2, 64, dtype=torch.int8), torch.ones(1), weight(64, 64), impl="w8a8-wgmma"
        )


@pytest.mark.parametrize("name", ["x_q", "codes", "out"])
def test_memory_that_begins_anywhere_is_refused(name: str) -> None:
    x, codes, out = (torch.zeros(65 * 64, dtype=torch.int8) for _ in range(3))
    places = {"x_q": x, "codes": codes, "out": out}
    starts = {key: int(key == name) for key in places}
    x, codes, out = (places[key][s : s + 64 * 64].view(64, 64) for key, s in starts.items())
    with pytest.raises(ValueError, match=f"{name} must begin at a multiple of 16 bytes"):
        gemm_wgmma(x, torch.ones(1), codes, weight(64, 64), None, None, out)


def test_arguments_are_aligned_as_the_compiler_does() -> None:
    assert ctypes.sizeof(Arguments) % wgmma_gemm.ALIGNMENT_BYTES == 0
    assert (Arguments.x.offset, Arguments.up.offset) == (128, 256)
    macros = macros_of(WgmmaTile(48))
    assert macros["A_OPERAND"] == 24
    assert macros["SIXTEENS"] == 3
