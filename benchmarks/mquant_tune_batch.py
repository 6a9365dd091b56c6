"""What is tried for W8A8 at 2 to 512 tokens, a decode step of many sequences: both kernels.

Tiles, parts and splits are taken where they differ: by how programs share the work, not by name.
cuBLAS's 16-bit and int8 products of the same shapes stand beside them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import product, zip_longest
from typing import Any
from unittest import mock

from duotone.weights.kernels.triton import gemm as triton_gemm
from duotone.weights.kernels.triton import split as triton_split
from duotone.weights.kernels.triton.gemm import GemmConfig, rounds
from duotone.weights.kernels.triton.split import SplitConfig

import mquant_cases as cases

TOKENS = (70, 16, 8, 128, 64, 310, 32, 160, 256, 467)
SHAPES = [(name, tokens) for tokens in TOKENS for name in cases.BATCH_LINEARS] + [("qkv", 2048)]
# An H200's; tuning elsewhere would want its own.
MULTIPROCESSORS = 132
# Of `in` that a split or part has at least.
MIN_INS = 256
# cuBLASLt's int8 product takes more than 16 rows.
INT_MM_TOKENS = 17
# (outs, ins, warps, stages) of the kernel for few tokens, by its tile of tokens.
_NARROW = [(64, 128, 4, 4), (64, 256, 4, 3), (128, 128, 4, 4), (128, 256, 8, 3), (64, 128, 4, 6)]
SPLIT_TILES = {
    16: _NARROW,
    32: _NARROW,
    64: [(128, 128, 8, 4), (64, 128, 4, 4), (128, 128, 4, 4), (128, 256, 8, 3)],
    128: [(128, 128, 8, 4), (64, 128, 4, 4), (128, 128, 8, 6)],
}
SPLITS = (1, 2, 3, 4, 6, 8, 12)
# Tiles of 64 tokens, of 128, and for 2,048 tokens; per_sm is what shared memory and registers hold.
SHORT = [
    GemmConfig(64, 128, 128, warps=4, stages=4, per_sm=2),
    GemmConfig(64, 64, 128, warps=4, stages=6, per_sm=2),
    GemmConfig(64, 128, 256, warps=4, stages=4, per_sm=1),
    GemmConfig(64, 32, 256, warps=4, stages=4, per_sm=2),
    GemmConfig(64, 64, 128, warps=4, stages=4, per_sm=3),
    GemmConfig(64, 256, 128, warps=8, stages=5, per_sm=1),
]
TALL = [
    GemmConfig(128, 128, 128, warps=4, stages=3, per_sm=2),
    GemmConfig(128, 64, 128, warps=4, stages=4, per_sm=2),
    GemmConfig(128, 128, 128, warps=8, stages=6, per_sm=1),
    GemmConfig(128, 32, 128, warps=4, stages=5, per_sm=2),
    GemmConfig(128, 256, 128, warps=8, stages=4, per_sm=1),
    GemmConfig(128, 64, 256, warps=4, stages=4, per_sm=1),
]
MANY = [
    GemmConfig(128, 256, 128, warps=8, stages=4, per_sm=1),
    GemmConfig(256, 128, 128, warps=8, stages=4, per_sm=1),
    GemmConfig(128, 128, 128, warps=8, stages=6, per_sm=1),
    GemmConfig(64, 256, 128, warps=4, stages=4, per_sm=1),
]
PARTS = (4, 1, 2, 8)


def candidates() -> Iterator[tuple[str, str, int, Any]]:
    """(kind, linear, tokens, config): all shapes' first, then all shapes' second, ..."""
    of_shapes = [[*_compared(*at), *_configs(*at)] for at in SHAPES]
    for turn in zip_longest(*of_shapes):
        for (name, tokens), tried in zip(SHAPES, turn, strict=True):
            if tried is not None:
                yield tried[0], name, tokens, tried[1]


def _compared(name: str, tokens: int) -> list[tuple[str, Any]]:
    kinds = ["bf16"] + ["int_mm"] * (tokens >= INT_MM_TOKENS)
    return [(kind, None) for kind in kinds]


def _configs(name: str, tokens: int) -> Iterator[tuple[str, Any]]:
    """The two kernels in turn, the most promising of each first."""
    families = (
        [("w8a8", c) for c in gemm_configs(name, tokens)],
        [("w8a8 split", c) for c in split_configs(name, tokens)],
    )
    for turn in zip_longest(*families):
        yield from (one for one in turn if one is not None)


def gemm_configs(name: str, tokens: int) -> list[GemmConfig]:
    """Tiles in turn, each with every number of parts that changes who computes what."""
    outs, ins, _ = cases.shape_of(name)
    tiles = SHORT if tokens <= 64 else [*TALL, *SHORT[:2]]
    found = {}
    for parts, config in product(PARTS, [*tiles, *(MANY if tokens > 512 else [])]):
        count = -(-tokens // config.tokens) * -(-outs // config.outs)
        cut = rounds(count, ins, config.per_sm * MULTIPROCESSORS, replace(config, parts=parts))
        if cut.parts == 1 or cut.part_ins >= MIN_INS:
            kept = replace(config, parts=cut.parts)
            found[kept] = None
    return list(found)


def split_configs(name: str, tokens: int) -> list[SplitConfig]:
    """Tiles with about two, four and one programs per multiprocessor."""
    if tokens > max(SPLIT_TILES):
        return []
    outs, ins, _ = cases.shape_of(name)
    tile = max(16, 1 << (tokens - 1).bit_length())
    found = {}
    for per_sm in (2, 4, 1):
        for rows, step, warps, stages in SPLIT_TILES[tile]:
            most = min(per_sm * MULTIPROCESSORS // -(-outs // rows), ins // max(MIN_INS, 2 * step))
            splits = max((s for s in SPLITS if s <= most), default=1)
            found[SplitConfig(rows, tile, step, splits, warps, stages)] = None
    return list(found)


class CompileOnly:
    """Stands for a kernel; compiles what would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **named: self.kernel.warmup(*args, grid=grid, **named)


def compile_all(launches: Sequence[Any], threads: int = 16) -> None:
    """Compile what `launches` would launch, at one time; what fails is to fail again when run."""

    def attempt(launch: Any) -> None:
        try:
            launch()
        except Exception as error:
            print(f"does not compile: {type(error).__name__}: {error}"[:200], flush=True)

    with ExitStack() as stack:
        for module, name in ((triton_gemm, "gemm_kernel"), (triton_split, "split_kernel")):
            only = CompileOnly(getattr(module, name))
            stack.enter_context(mock.patch.object(module, name, only))
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(attempt, launches))
