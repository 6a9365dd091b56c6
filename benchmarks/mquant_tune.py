"""Tile sizes tried one after the other, the most promising first, until the time is over."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from duotone.bench.timing import CudaClock, rotated_count, rotated_us
from duotone.provenance import stamp
from duotone.weights.kernels.configs import one
from duotone.weights.kernels.triton_gemm import GemmConfig, gemm_w8a8
from duotone.weights.kernels.triton_gemv import GemvConfig, gemv
from duotone.weights.kernels.triton_hadamard import HadamardConfig, hadamard_rows
from duotone.weights.kernels.triton_hadamard_base import BaseConfig
from duotone.weights.kernels.triton_hadamard_columns import ColumnsConfig
from duotone.weights.kernels.triton_scratch import unpacked_times_16
from duotone.weights.kernels.triton_split import SplitConfig, split_linear
from duotone.weights.linear import linear_float, linear_int
from duotone.weights.online_hadamard import hadamard_quantize
from duotone.weights.packed_weight import PackedWeight

import mquant_cases as cases

REPEATS = 5
NAMES = ("gate_up", "down", "qkv")
# fc2 of Qwen2-VL's vision tower: no gate before it.
FC2 = (1280, 5120, "quick_gelu")
PREPARE = "prepare static"


@dataclass(frozen=True)
class Trial:
    """One configuration of one kernel at one shape."""

    kind: str
    linear: str
    tokens: int
    config: Any


def shape_of(name: str) -> tuple[int, int, str]:
    """(out, in) of a linear, and what makes its input."""
    return FC2 if name == "fc2" else cases.LINEARS[name]


def launch(trial: Trial, c: cases.Linear) -> Tensor:
    """The kernel that is tried."""
    if trial.kind == PREPARE:
        x, given = before_hadamard(c)
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


def before_hadamard(c: cases.Linear) -> tuple[Tensor, dict[str, Any]]:
    """What stands before the codes of a transformed input."""
    if c.before != "gate":
        return c.x, {"scale": c.rows, "activation": c.before}
    gate, up = c.x.chunk(2, 1)
    return gate, {"scale": c.rows, "activation": "silu", "up": up}


def weight_of(kind: str, c: cases.Linear) -> PackedWeight:
    """The weight that this kind multiplies with."""
    if "g128" in kind or kind.startswith("w4a16"):
        return c.w4_groups
    return c.w8 if kind.startswith("w8") else c.w4


def reference(kind: str, c: cases.Linear) -> Tensor:
    """What it must give."""
    if kind == PREPARE:
        x, given = before_hadamard(c)
        sizes = cases.transform(c.ins)
        return hadamard_quantize(x, given.pop("scale"), *sizes, impl="reference", **given)[0].codes
    weight = weight_of(kind, c)
    if kind == "w4a16 split":
        return linear_float(c.input, weight, impl="reference")
    impl = "int_mm" if kind == "w8a8" else "reference"
    return linear_int(c.codes, c.rows, weight, impl=impl)


def hadamard_trials() -> Iterator[Trial]:
    """Activation, online Hadamard and codes: one launch, or two of small programs."""
    many = [(4, 1, 3), (8, 1, 2), (4, 2, 2), (4, 1, 4), (8, 1, 1), (4, 1, 2), (8, 2, 1), (4, 3, 1)]
    few = [(16, 4), (32, 4), (32, 8), (64, 4), (16, 8)]
    one_launch = [HadamardConfig(0, many=BaseConfig(*each)) for each in many]
    two = [HadamardConfig(1 << 30, few=ColumnsConfig(*each)) for each in few]
    for single, double in zip_longest(one_launch, two):
        for name, tokens in product(("down", "fc2"), (1, 16, 64, 256, 2048, 8192)):
            if tokens >= 16 and single is not None:
                yield Trial(PREPARE, name, tokens, single)
            if tokens <= 2048 and double is not None:
                yield Trial(PREPARE, name, tokens, double)


def gemm_trials() -> Iterator[Trial]:
    """The W8A8 kernel."""
    tiles = [
        GemmConfig(128, 256, 128, warps=8, stages=3),
        GemmConfig(128, 256, 128, warps=8, stages=4),
        GemmConfig(128, 256, 128, warps=8, stages=3, per_sm=0),
        GemmConfig(256, 128, 128, warps=8, stages=3),
        GemmConfig(128, 256, 128, warps=8, stages=3, flatten=True),
        GemmConfig(128, 256, 64, warps=8, stages=5),
        GemmConfig(128, 128, 128, warps=4, stages=4, per_sm=0),
        GemmConfig(128, 128, 128, warps=4, stages=3, per_sm=2),
        GemmConfig(128, 128, 256, warps=8, stages=3),
        GemmConfig(128, 128, 128, warps=8, stages=5),
        GemmConfig(256, 128, 128, warps=8, stages=3, per_sm=0),
        GemmConfig(128, 256, 128, group=16, warps=8, stages=3),
        GemmConfig(128, 256, 128, group=4, warps=8, stages=3),
        GemmConfig(128, 256, 256, warps=8, stages=2),
    ]
    for config, name in product(tiles, NAMES):
        yield Trial("w8a8", name, 8192, config)
    # Where the last round counts.
    few = [
        GemmConfig(128, 128, 128, warps=4, stages=3, per_sm=2),
        GemmConfig(128, 128, 128, warps=4, stages=3, per_sm=2, parts=2),
        GemmConfig(128, 128, 128, warps=4, stages=3, per_sm=2, parts=4),
        GemmConfig(128, 256, 128, warps=8, stages=3, parts=4),
        GemmConfig(64, 128, 128, warps=4, stages=4, per_sm=2),
        GemmConfig(64, 128, 128, warps=4, stages=4, per_sm=2, parts=4),
    ]
    for config, name, tokens in product(few, NAMES, (512, 2048)):
        yield Trial("w8a8", name, tokens, config)


def grouped_gemm_trials() -> Iterator[Trial]:
    """The same with groups of 128: two sums per output in registers."""
    tiles = [
        GemmConfig(64, 128, 128, warps=4, stages=3, per_sm=3, registers=168),
        GemmConfig(64, 128, 128, warps=4, stages=4, per_sm=2),
        GemmConfig(64, 256, 128, warps=8, stages=3),
        GemmConfig(128, 128, 128, warps=8, stages=4),
        GemmConfig(128, 64, 128, warps=4, stages=4, per_sm=2),
        GemmConfig(64, 64, 128, warps=4, stages=4, per_sm=3),
    ]
    for config, name in product(tiles, NAMES):
        yield Trial("w4a8 g128 scratch", name, 2048, config)


def gemv_trials(kinds: Sequence[str] = ("w4a8 gemv", "w8a8 gemv")) -> Iterator[Trial]:
    """The kernel for one token."""
    for kind in kinds:
        for outs, words, warps in product((4, 8, 16), (256, 512, 1024), (2, 4, 8)):
            if 16 <= outs * words // (32 * warps) <= 64:
                for name in NAMES:
                    yield Trial(kind, name, 1, GemvConfig(outs, words, warps))


def split_trials() -> Iterator[Trial]:
    """The kernel for few tokens: outs, ins, warps, stages; programs."""
    codes = [
        (64, 128, 4, 4),
        (64, 256, 4, 4),
        (64, 256, 4, 3),
        (128, 256, 4, 3),
        (128, 256, 8, 3),
        (64, 512, 4, 3),
        (128, 128, 4, 5),
    ]
    groups = [(64, 128, 4, 3), (64, 128, 4, 5), (128, 128, 8, 3), (128, 128, 4, 4)]
    for kind, shapes in (("w4a8 split", codes), ("w4a16 split", groups), ("w8a8 split", codes)):
        yield from split_trials_of(kind, shapes)


def split_trials_of(kind: str, shapes: Sequence[tuple[int, int, int, int]]) -> Iterator[Trial]:
    """Shapes are outs, ins, warps, stages."""
    for (outs, ins, warps, stages), programs, name in product(shapes, (264, 528, 1056), NAMES):
        rows, columns, _ = cases.LINEARS[name]
        splits = max(1, min(programs * outs // rows, columns // (2 * ins)))
        yield Trial(kind, name, 16, SplitConfig(outs, 16, ins, splits, warps, stages))


def grouped_trials() -> Iterator[Trial]:
    """Groups of 128: the kernels for one, few and many tokens in turn."""
    deep = [(64, 128, 4, 5), (64, 128, 4, 4), (64, 128, 4, 3), (128, 128, 8, 4), (32, 128, 2, 5)]
    families = (
        grouped_gemm_trials(),
        gemv_trials(("w4a8 g128 gemv",)),
        split_trials_of("w4a8 g128 split", deep),
    )
    for trials in zip_longest(*families):
        yield from (trial for trial in trials if trial is not None)


def middle_trials() -> Iterator[Trial]:
    """Middle numbers of tokens: unpacking in flight."""
    shapes = [
        (128, 64, 128, 4, 3),
        (128, 128, 128, 8, 3),
        (64, 128, 128, 4, 3),
        (128, 128, 128, 8, 4),
        (128, 64, 256, 8, 3),
    ]
    for (outs, tokens, ins, warps, stages), count in product(shapes, (64, 256, 512)):
        rows, columns, _ = cases.LINEARS["down"]
        tiles = -(-rows // outs) * -(-count // tokens)
        splits = max(1, min(264 // tiles, columns // 1024))
        config = SplitConfig(outs, tokens, ins, splits, warps, stages)
        yield Trial("w4a8 middle", "down", count, config)


def run(seconds: float, folder: Path, clock: CudaClock) -> None:
    """Try, print and write; each family has its share of the time."""
    rows: list[dict[str, Any]] = []
    families = ((hadamard_trials, 0.3), (gemm_trials, 0.2), (grouped_trials, 0.2))
    families += ((gemv_trials, 0.1), (split_trials, 0.1), (middle_trials, 0.1))
    for family, share in families:
        end = time.monotonic() + share * seconds
        kept: dict[tuple, Any] = {}
        for trial in family():
            if time.monotonic() > end:
                break
            rows.append(tried(trial, kept, clock))
            print(rows[-1], flush=True)
        kept.clear()
        clock.release()
        write(folder, rows, clock)


def tried(trial: Trial, kept: dict[tuple, Any], clock: CudaClock) -> dict[str, Any]:
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
    outs, ins, _ = shape_of(trial.linear)
    if trial.kind == PREPARE:
        return row | {"us": round(us, 2), "max_error": error}
    tops = 2 * trial.tokens * outs * ins / us / 1e6
    return row | {"us": round(us, 2), "tops": round(tops, 1), "max_error": error}


def problems(trial: Trial, kept: dict[tuple, Any], clock: CudaClock) -> tuple[list, Tensor]:
    """Buffers of this shape, made once per family, and the result of the first."""
    key = trial.kind, trial.linear, trial.tokens
    if key not in kept:
        outs, ins, before = shape_of(trial.linear)
        # what a Hadamard reads was written just before
        large = trial.tokens > 512 or trial.kind == PREPARE
        count = 2 if large else rotated_count(outs * ins // 2, clock.free_bytes())
        linears = [cases.Linear(outs, ins, before, trial.tokens) for _ in range(count)]
        kept[key] = linears, reference(trial.kind, linears[0])
    return kept[key]


def write(folder: Path, rows: list[dict[str, Any]], clock: CudaClock) -> None:
    """All rows, the best of each shape first in `best`."""
    best: dict[str, Any] = {}
    for row in rows:
        key = f"{row['kind']} {row['linear']} {row['tokens']}"
        if "us" in row and (key not in best or row["us"] < best[key]["us"]):
            best[key] = row
    data = {"schema": "duotone.mquant.tune/1", **stamp(clock.device), "best": best, "rows": rows}
    (folder / "tune.json").write_text(json.dumps(data, indent=1) + "\n")
    for key, row in best.items():
        print("BEST", key, row["us"], "us", row["config"], flush=True)
