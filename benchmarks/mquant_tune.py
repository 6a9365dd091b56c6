"""Tile sizes tried one after the other, the most promising first, until the time is over."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product, zip_longest
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.bench.timing import CudaClock, rotated_count, rotated_us
from duotone.report.provenance import stamp
from duotone.weights.kernels.configs import one
from duotone.weights.kernels.reference import scaled
from duotone.weights.kernels.triton.gemm import GemmConfig, gemm_w8a8
from duotone.weights.kernels.triton.gemv import GemvConfig, gemv
from duotone.weights.kernels.triton.scratch import unpacked_times_16
from duotone.weights.kernels.triton.split import SplitConfig, split_linear
from duotone.weights.modules.linear import linear_float, linear_int
from duotone.weights.modules.packed_weight import PackedWeight

import mquant_cases as cases
import mquant_tune_batch as batch
import mquant_tune_hadamard as hadamard

REPEATS = 5
NAMES = ("gate_up", "down", "qkv")
# Products of libraries, for comparison.
COMPARED = ("bf16", "int_mm")


@dataclass(frozen=True)
class Trial:
    """One configuration of one kernel at one shape."""

    kind: str
    linear: str
    tokens: int
    config: Any


def launch(trial: Trial, c: cases.Linear) -> Tensor:
    """The kernel that is tried."""
    if trial.kind == hadamard.KIND:
        return hadamard.codes(c, trial.config)
    if trial.kind == "bf16":
        return F.linear(c.input, c.dense)
    if trial.kind == "int_mm":
        return torch._int_mm(c.codes, c.w8.codes.T)
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
    """What it must give."""
    if kind == hadamard.KIND:
        return hadamard.reference(c)
    if kind in COMPARED:
        return launch(Trial(kind, "", 0, None), c)
    weight = weight_of(kind, c)
    if kind == "w4a16 split":
        return linear_float(c.input, weight, impl="reference")
    if kind.startswith("w8a8") and c.tokens >= batch.INT_MM_TOKENS:
        sums = torch._int_mm(c.codes, weight.codes.T)
        return scaled(sums, c.rows, weight, None, None, torch.bfloat16)
    return linear_int(c.codes, c.rows, weight, impl="reference")


def hadamard_trials() -> Iterator[Trial]:
    """Activation, online Hadamard and codes."""
    yield from (Trial(*given) for given in hadamard.candidates())


def batch_trials() -> Iterator[Trial]:
    """W8A8 at 2 to 512 tokens."""
    yield from (Trial(*given) for given in batch.candidates())


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


# Trials and their share of the time, in the order in which they are tried.
FAMILIES: dict[str, tuple[Callable[[], Iterator[Trial]], float]] = {
    "hadamard": (hadamard_trials, 0.6),
    "batch": (batch_trials, 2.0),
    "gemm": (gemm_trials, 0.3),
    "groups": (grouped_trials, 0.3),
    "gemv": (gemv_trials, 0.15),
    "split": (split_trials, 0.15),
    "middle": (middle_trials, 0.1),
}


def run(
    seconds: float, folder: Path, clock: CudaClock, names: Sequence[str] = tuple(FAMILIES)
) -> None:
    """Try, print and write; each family of `names` has its share of the time."""
    rows: list[dict[str, Any]] = []
    total = sum(FAMILIES[name][1] for name in names)
    for name in names:
        family, share = FAMILIES[name]
        end = time.monotonic() + share / total * seconds
        kept: dict[tuple, Any] = {}
        trials = list(family())
        if name == "batch":
            batch.compile_all(
                [partial(launch, t, problems(t, kept, clock)[0][0]) for t in trials if t.config]
            )
        for trial in trials:
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
    outs, ins, _ = cases.shape_of(trial.linear)
    if trial.kind == hadamard.KIND:
        return row | {"us": round(us, 2), "max_error": error}
    tops = 2 * trial.tokens * outs * ins / us / 1e6
    return row | {"us": round(us, 2), "tops": round(tops, 1), "max_error": error}


def problems(trial: Trial, kept: dict[tuple, Any], clock: CudaClock) -> tuple[list, Tensor]:
    """Buffers of this shape, made once per family, and the result of the first."""
    key = trial.kind, trial.linear, trial.tokens
    if key not in kept:
        outs, ins, before = cases.shape_of(trial.linear)
        # what a Hadamard reads was written just before
        large = trial.tokens > 2048 or trial.kind == hadamard.KIND
        nbytes = int(outs * ins * weight_bytes(trial.kind))
        count = 2 if large else rotated_count(nbytes, clock.free_bytes())
        linears = [cases.Linear(outs, ins, before, trial.tokens) for _ in range(count)]
        share_weights(trial, linears, kept)
        kept[key] = linears, reference(trial.kind, linears[0])
    return kept[key]


def weight_bytes(kind: str) -> float:
    """Of a weight's element, without scales."""
    if kind == "bf16":
        return 2.0
    return 1.0 if kind.startswith(("w8", "int_mm")) else 0.5


def share_weights(trial: Trial, linears: list[cases.Linear], kept: dict[tuple, Any]) -> None:
    """Weights of 8 and 16 bits are made once for all kinds and numbers of tokens."""
    if weight_bytes(trial.kind) == 0.5:
        return
    name = "dense" if trial.kind == "bf16" else "w8"
    first = kept.setdefault((name, trial.linear), linears)
    for linear, other in zip(linears, first, strict=False):
        setattr(linear, name, getattr(other, name))


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
