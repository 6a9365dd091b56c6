"""Tiles by shape: what an H200 measured as the best (benchmarks/mquant/tune.py)."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from duotone.weights.kernels.configs import (
    gemm_config,
    gemm_pieces,
    gemv_config,
    split_config,
)
from duotone.weights.kernels.triton.gemm import rounds
from duotone.weights.kernels.triton.gemv import GemvConfig
from duotone.weights.kernels.triton.split import SplitConfig
from duotone.weights.modules.packed_weight import PackedWeight

SHAPES = {"qkv": (4608, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}


def eight_bits(outs: int, ins: int) -> PackedWeight:
    return PackedWeight(torch.empty(outs, ins, dtype=torch.int8), 8, torch.ones(outs))


def weight(name: str, group: int | None = None) -> PackedWeight:
    outs, ins = SHAPES[name]
    codes = torch.empty(outs, ins // 2, dtype=torch.uint8)
    scale = torch.ones((outs,) if group is None else (outs, ins // group))
    return PackedWeight(codes, 4, scale, group)


def test_a_round_that_would_be_near_empty_is_a_product_of_smaller_tiles() -> None:
    # 576 tiles of 128 x 128, 264 at one time: 48 are left
    outs, ins = SHAPES["qkv"]
    (first, large), (second, small) = gemm_pieces(2048, eight_bits(outs, ins))
    assert (first, second) == (slice(4224), slice(4224, 4608))
    assert 4224 // large.outs * 2048 // large.tokens == 2 * 264
    assert 384 // small.outs * 2048 // small.tokens <= small.per_sm * 132


@pytest.mark.parametrize(
    ("tokens", "outs"), [(2048, 37888), (8192, 4608), (2048, 3584), (300, 100), (70, 4096)]
)
def test_other_products_are_in_one_piece(tokens: int, outs: int) -> None:
    assert [part for part, _ in gemm_pieces(tokens, eight_bits(outs, 512))] == [slice(outs)]


@pytest.mark.parametrize(("tokens", "outs"), [(1024, 4608), (2100, 4700), (1500, 5000)])
def test_pieces_are_all_channels_once(tokens: int, outs: int) -> None:
    pieces = gemm_pieces(tokens, eight_bits(outs, 512))
    covered = [i for part, _ in pieces for i in range(outs)[part]]
    assert covered == list(range(outs))
    assert all(part.stop > (part.start or 0) for part, _ in pieces)


@pytest.mark.parametrize(("group", "step"), [(32, 32), (64, 64), (128, 128), (256, 128)])
@pytest.mark.parametrize("floating", [False, True], ids=["int8", "bfloat16"])
def test_steps_stay_within_groups(group: int, step: int, floating: bool) -> None:
    grouped = weight("qkv", group)
    assert gemm_config(8192, grouped).ins == step
    for tokens in (1, 16, 64, 512):
        config = split_config(tokens, grouped, floating)
        assert config.ins == step
        assert config.stages > 2


@pytest.mark.parametrize(
    ("name", "one", "sixteen"),
    [
        ("qkv", GemvConfig(4, 512, 4), SplitConfig(64, 16, 256, 7, 4, 3)),
        ("gate_up", GemvConfig(8, 256, 2), SplitConfig(64, 16, 256, 1, 4, 3)),
        ("down", GemvConfig(4, 512, 4), SplitConfig(64, 16, 256, 9, 4, 3)),
    ],
)
def test_few_tokens(name: str, one: GemvConfig, sixteen: SplitConfig) -> None:
    assert gemv_config(weight(name)) == one
    assert split_config(16, weight(name)) == sixteen


@pytest.mark.parametrize(("tokens", "splits"), [(64, 9), (256, 2), (512, 1)])
def test_middle_numbers_of_tokens(tokens: int, splits: int) -> None:
    assert split_config(tokens, weight("down")) == SplitConfig(128, 64, 128, splits, 4, 3)


@pytest.mark.parametrize("tokens", [8, 33, 64, 70, 128, 256, 467, 512])
def test_a_batch_occupies_the_gpu_in_one_round_or_more(tokens: int) -> None:
    """Products of few tiles are cut so that most multiprocessors work, and fit shared memory."""
    for outs, ins in ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)):
        config = gemm_config(tokens, eight_bits(outs, ins))
        stage_bytes = (config.tokens + config.outs) * config.ins
        assert config.per_sm * config.stages * stage_bytes <= 227 * 1024
        tiles = -(-tokens // config.tokens) * -(-outs // config.outs)
        assert rounds(tiles, ins, config.per_sm * 132, config).programs >= 132 * 0.7


@pytest.mark.parametrize("tokens", [2, 16, 32, 64, 100, 512])
def test_splits_of_8_bits_run_at_one_time(tokens: int) -> None:
    config = split_config(tokens, eight_bits(4096, 14336))
    shared_bytes = (config.outs + config.tokens) * config.ins * config.stages
    programs = 132 * (227 * 1024 // shared_bytes)
    tiles = 4096 // config.outs * -(-tokens // config.tokens)
    assert 132 * 0.7 < tiles * config.splits <= programs
