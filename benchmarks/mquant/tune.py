"""Tile sizes of the linear kernels, tried in turn until the time is over.

    python -m benchmarks.mquant.tune --out DIR --seconds 60      tune.json
    python -m benchmarks.mquant.tune --out DIR --seconds 120 --families gemm,split

The tables of `duotone.weights.kernels.configs` come from such runs. Within a family the most
promising tiles come first, each at all shapes; every family has an equal part of the time.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duotone.bench.timing import Clock, CudaClock, rotated_count, rotated_us
from duotone.report.provenance import stamp
from duotone.weights.kernels.configs import one
from duotone.weights.kernels.triton.gemm import GemmConfig, gemm_w8a8
from duotone.weights.kernels.triton.gemv import GemvConfig, gemv
from duotone.weights.kernels.triton.hadamard import HadamardConfig, hadamard_rows
from duotone.weights.kernels.triton.hadamard_base import BaseConfig
from duotone.weights.kernels.triton.hadamard_columns import ColumnsConfig
from duotone.weights.kernels.triton.scratch import unpacked_times_16
from duotone.weights.kernels.triton.split import SplitConfig, split_linear
from duotone.weights.modules.linear import linear_float, linear_int
from duotone.weights.modules.online_hadamard import hadamard_quantize
from duotone.weights.modules.packed_weight import PackedWeight

from . import cases

REPEATS = 5
NAMES = ("gate_up", "down", "qkv")
# The fewest columns of `in` that a split or a part of a tile has.
MIN_INS = 256
PARTS, PROGRAMS = (4, 1, 2), (264, 528, 1056)
# (tokens, outs, ins, warps, stages, programs per multiprocessor) of a GEMM's tile, by its tokens.
TALL = [(128, 256, 128, 8, 3, 1), (128, 128, 128, 4, 3, 2), (128, 256, 128, 8, 4, 1)]
TALL += [(256, 128, 128, 8, 3, 1), (128, 128, 128, 8, 5, 1), (128, 64, 128, 4, 4, 2)]
SHORT = [(64, 128, 128, 4, 4, 2), (64, 64, 128, 4, 6, 2), (64, 256, 128, 8, 3, 1)]
SHORT += [(64, 128, 256, 4, 4, 1), (64, 64, 128, 4, 4, 3)]
# (outs, ins, warps, stages) of the kernel for few tokens.
FEW = [(64, 128, 4, 4), (64, 256, 4, 3), (128, 256, 8, 3), (128, 128, 4, 4), (64, 128, 4, 6)]
GROUPED = [(64, 128, 4, 5), (64, 128, 4, 3), (128, 128, 8, 4), (32, 128, 2, 5)]


@dataclass(frozen=True)
class Trial:
    """One configuration of one kernel at one shape."""

    kind: str
    linear: str
    tokens: int
    config: Any


def gemm_trials() -> Iterator[Trial]:
    """W8A8 for many tokens and for a batch's; with groups of 128, two sums per output."""
    many = (2048, 8192)
    for parts, tile in product(PARTS, TALL + SHORT):
        config = _gemm_config(tile, parts=parts)
        yield from (Trial("w8a8", *at, config) for at in _shapes((128, 310, 512)))
        if parts == 1:
            yield from (Trial("w8a8", *at, config) for at in _shapes(many))
    for tile in SHORT + TALL:
        config = _gemm_config(tile)
        yield from (Trial("w4a8 g128 scratch", *at, config) for at in _shapes(many[:1]))


def _gemm_config(tile: tuple[int, ...], parts: int = 1) -> GemmConfig:
    tokens, outs, ins, warps, stages, per_sm = tile
    return GemmConfig(tokens, outs, ins, warps=warps, stages=stages, per_sm=per_sm, parts=parts)


def _shapes(tokens: Sequence[int]) -> list[tuple[str, int]]:
    return [(name, count) for count in tokens for name in NAMES]


def gemv_trials() -> Iterator[Trial]:
    """The kernel for one token."""
    for outs, words, warps in product((4, 8, 16), (256, 512, 1024), (2, 4, 8)):
        if 16 <= outs * words // (32 * warps) <= 64:
            for kind, name in product(("w4a8 gemv", "w8a8 gemv", "w4a8 g128 gemv"), NAMES):
                yield Trial(kind, name, 1, GemvConfig(outs, words, warps))


def split_trials() -> Iterator[Trial]:
    """The kernel for few tokens, with about `PROGRAMS` programs."""
    kinds = {"w4a8 split": FEW, "w8a8 split": FEW}
    kinds |= {"w4a16 split": GROUPED, "w4a8 g128 split": GROUPED}
    for programs, (kind, tiles) in product(PROGRAMS, kinds.items()):
        for (outs, ins, warps, stages), (name, tokens) in product(tiles, _shapes((16, 64))):
            rows, columns, _ = cases.LINEARS[name]
            splits = max(1, min(programs * outs // rows, columns // max(MIN_INS, 2 * ins)))
            yield Trial(kind, name, tokens, SplitConfig(outs, tokens, ins, splits, warps, stages))


def hadamard_trials() -> Iterator[Trial]:
    """Activation, online Hadamard and codes: in one launch, and in two of small programs."""
    many = [BaseConfig(*each) for each in ((4,), (4, 128), (8,), (4, 168), (8, 128))]
    few = [ColumnsConfig(*each) for each in ((16, 4), (32, 4), (32, 8), (64, 4), (16, 8))]
    for single, double in zip(many, few, strict=True):
        for name, tokens in product(("down", "fc2"), (1, 16, 64, 256, 2048, 8192)):
            if tokens >= 16:
                yield Trial("hadamard", name, tokens, HadamardConfig(0, many=single))
            if tokens <= 2048:
                yield Trial("hadamard", name, tokens, HadamardConfig(1 << 30, few=double))


FAMILIES: dict[str, Callable[[], Iterator[Trial]]] = {
    "gemm": gemm_trials,
    "split": split_trials,
    "gemv": gemv_trials,
    "hadamard": hadamard_trials,
}


def launch(trial: Trial, c: cases.Linear) -> Tensor:
    """Run the kernel that is tried."""
    if trial.kind == "hadamard":
        x, given = c.before_codes()
        return hadamard_rows(x, *cases.transform(c.ins), config=trial.config, **given)[0]
    weight, ends = weight_of(trial.kind, c), (None, None, torch.bfloat16, trial.config)
    if trial.kind == "w8a8":
        return gemm_w8a8(c.codes, c.rows, weight.codes, weight, *ends)
    if trial.kind == "w4a8 g128 scratch":
        return gemm_w8a8(c.codes, c.rows, unpacked_times_16(weight), weight, *ends)
    if trial.kind == "w4a16 split":
        return split_linear(c.input, one(c.input.device), weight, *ends)
    run_kernel = gemv if "gemv" in trial.kind else split_linear
    return run_kernel(c.codes, c.rows, weight, *ends)


def weight_of(kind: str, c: cases.Linear) -> PackedWeight:
    """The weight that this kind multiplies with."""
    if "g128" in kind or kind.startswith("w4a16"):
        return c.w4_groups
    return c.w8 if kind.startswith("w8") else c.w4


def reference(kind: str, c: cases.Linear) -> Tensor:
    """The result that the kernel must give; a Hadamard's codes may differ by one."""
    if kind == "hadamard":
        x, given = c.before_codes()
        sizes = cases.transform(c.ins)
        return hadamard_quantize(x, given.pop("scale"), *sizes, impl="reference", **given)[0].codes
    weight = weight_of(kind, c)
    if kind == "w4a16 split":
        return linear_float(c.input, weight, impl="reference")
    return linear_int(c.codes, c.rows, weight, impl="reference")


def tried(trial: Trial, kept: dict[tuple, Any], clock: Clock) -> dict[str, Any]:
    """Time of one configuration, and how far its result is from the reference's."""
    row = asdict(trial)
    linears, expected = problems(trial, kept, clock)
    try:
        error = (launch(trial, linears[0]).float() - expected.float()).abs().max().item()
        work = [partial(launch, trial, c) for c in linears]
        for one_launch in work:
            one_launch()
        us = rotated_us(clock.capture(work), len(work), clock, REPEATS)
    except Exception as error:
        return row | {"failed": f"{type(error).__name__}: {error}"[:200]}
    return row | {"us": round(us, 2), "max_error": error}


def problems(trial: Trial, kept: dict[tuple, Any], clock: Clock) -> tuple[list, Tensor]:
    """Buffers of this shape, made once per family, and the result of the first."""
    key = trial.kind, trial.linear, trial.tokens
    if key not in kept:
        outs, ins, before = cases.shape_of(trial.linear)
        # What a Hadamard reads was written just before.
        large = trial.tokens > 2048 or trial.kind == "hadamard"
        nbytes = outs * ins if trial.kind.startswith("w8") else outs * ins // 2
        count = 2 if large else rotated_count(nbytes, clock.free_bytes())
        linears = [cases.Linear(outs, ins, before, trial.tokens) for _ in range(count)]
        kept[key] = linears, reference(trial.kind, linears[0])
    return kept[key]


def run(seconds: float, folder: Path, clock: Clock, names: Sequence[str]) -> None:
    """Try and print; tune.json has all rows, and the best of each shape first."""
    rows: list[dict[str, Any]] = []
    for name in names:
        end, kept = time.monotonic() + seconds / len(names), {}
        # Where a linear is large, several numbers of programs come to one split.
        for trial in dict.fromkeys(FAMILIES[name]()):
            if time.monotonic() > end:
                break
            rows.append(tried(trial, kept, clock))
            print(rows[-1], flush=True)
        kept.clear()
        clock.release()
    best: dict[str, Any] = {}
    for row in rows:
        key = f"{row['kind']} {row['linear']} {row['tokens']}"
        if "us" in row and (key not in best or row["us"] < best[key]["us"]):
            best[key] = row
    data = {"schema": "duotone.mquant.tune/1", **stamp(clock.device), "best": best, "rows": rows}
    (folder / "tune.json").write_text(json.dumps(data, indent=1) + "\n")


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--families", default=",".join(FAMILIES))
    arguments = parser.parse_args()
    names = arguments.families.split(",")
    if unknown := [name for name in names if name not in FAMILIES]:
        parser.error(f"--families are of {', '.join(FAMILIES)}; got {unknown}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    run(arguments.seconds, arguments.out, CudaClock(), names)


if __name__ == "__main__":
    main()
