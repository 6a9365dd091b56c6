"""`duotone bench generate`: rows of `model.generate`, as a user calls it.

A row is called several times with one prompt. The first call has never seen its length; the last
one is warm. Times are between tokens, taken by a stopping criterion that waits for the device.
"""

from __future__ import annotations

import gc
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch

import duotone
from duotone.inference.stopping import StepClock
from duotone.report.provenance import stamp

SCHEMA = "duotone.generate/1"
METHOD = (
    "model.generate, greedy; ms per token: median between tokens of the last call, after the "
    "first ones; idle: share of a step's time in which no kernel runs"
)
# Tokens before the medians, and steps that are profiled.
WARM_TOKENS, PROFILED = 16, 4
PLAIN, NO_CUDNN, STATIC = "plain", "plain, cuDNN off", "StaticCache, compiled"
LIBRARY = re.compile(r"(quanto|hqq)@(\d)")
PACKAGES = {"quanto": "optimum", "hqq": "hqq"}
STEP_BY_STEP = ", no graphs"
DEFAULT_ROWS = (PLAIN, NO_CUDNN, "duotone@1", "calibquant@1", "duotone-mixed@2", "kivi@2")


@dataclass(frozen=True)
class Load:
    """Question to every row: batch, tokens of a prompt, new tokens, calls."""

    batch: int
    tokens: int
    new_tokens: int
    padded: bool = False
    calls: int = 3

    def __post_init__(self) -> None:
        if self.new_tokens < WARM_TOKENS + 2 * PROFILED or self.calls < 2 or self.batch < 1:
            raise ValueError(
                f"a row needs a batch, 2 calls and {WARM_TOKENS + 2 * PROFILED} new tokens; got "
                f"{self}"
            )


def check_row(name: str) -> None:
    """Raise ValueError for an unknown row, ImportError for one whose package is missing."""
    if name in (PLAIN, NO_CUDNN, STATIC):
        return
    if found := LIBRARY.fullmatch(name):
        if find_spec(PACKAGES[found[1]]) is None:
            raise ImportError(f"the row {name!r} needs the package {PACKAGES[found[1]]!r}")
        return
    _spec(name)


def _spec(name: str) -> Any:
    scheme, at, bits = name.removesuffix(STEP_BY_STEP).partition("@")
    if at and not bits.isdecimal():
        raise ValueError(
            f"--row must be {PLAIN!r}, {NO_CUDNN!r}, {STATIC!r}, quanto@BITS, hqq@BITS, or a "
            f"scheme as NAME@BITS, with {STEP_BY_STEP!r} after it or not; got {name!r}"
        )
    return duotone.scheme(scheme, bits=int(bits)) if at else duotone.scheme(scheme)


class Row:
    """One way to call `generate`. opened: the handle of `enable`, inside `block`."""

    def __init__(self, name: str, model: Any) -> None:
        self.name, self.model = name, model
        self.is_ours = name not in (PLAIN, NO_CUDNN, STATIC) and not LIBRARY.fullmatch(name)
        self.opened: Any = None

    @contextmanager
    def block(self) -> Iterator[None]:
        """The block in which all calls of this row are made."""
        around: AbstractContextManager[Any] = nullcontext()
        if self.is_ours:
            graphs = not self.name.endswith(STEP_BY_STEP)
            around = duotone.enable(self.model, _spec(self.name), graphs=graphs)
        was_on = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(was_on and self.name != NO_CUDNN)
        try:
            with around as self.opened:
                yield
        finally:
            self.opened = None
            torch.backends.cuda.enable_cudnn_sdp(was_on)

    def settings(self) -> dict[str, Any]:
        """Arguments of `generate` that make the row."""
        if self.name == STATIC:
            return {"cache_implementation": "static"}
        if found := LIBRARY.fullmatch(self.name):
            axis = {"axis_key": 1, "axis_value": 1} if found[1] == "hqq" else {}
            config = {"backend": found[1], "nbits": int(found[2]), "q_group_size": 64, **axis}
            return {"cache_implementation": "quantized", "cache_config": config}
        return {}


class Bench:
    """Rows of one model on one prompt. inputs: of `generate`, but for its settings."""

    def __init__(
        self, name: str, model: Any, load: Load, inputs: Mapping[str, torch.Tensor]
    ) -> None:
        self.name, self.model, self.load, self.inputs = name, model, load, dict(inputs)
        self.device, self.weights = model.device, "16 bit"

    def row(self, name: str) -> dict[str, Any]:
        """Measure a row; where it cannot run, its "reason" instead."""
        try:
            check_row(name)
            return {"row": name, **self._measure(Row(name, self.model))}
        except (ImportError, RuntimeError, NotImplementedError, torch.OutOfMemoryError) as error:
            return {"row": name, "reason": f"{type(error).__name__}: {error}".partition("\n")[0]}
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _measure(self, row: Row) -> dict[str, Any]:
        with row.block(), warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always", category=duotone.SlowPathWarning)
            calls = [self._call(row) for _ in range(self.load.calls)]
            result = self._summary(calls)
            if row.opened is not None:
                report = row.opened.memory()
                result["cache_bytes"] = report.total_bytes
                result["cache_bytes_16_bit"] = report.dense_equivalent_bytes
                result["graph_bytes"] = row.opened.graph_bytes()
            result["idle"] = self._idle(row)
        slow = {str(w.message) for w in said if issubclass(w.category, duotone.SlowPathWarning)}
        return {**result, "slow_paths": sorted(slow)}

    def _call(self, row: Row, new_tokens: int | None = None, also: Sequence[Callable] = ()) -> dict:
        clock, on_gpu = StepClock(self.device), self.device.type == "cuda"
        before = 0
        if on_gpu:
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        new = new_tokens or self.load.new_tokens
        begin = perf_counter()
        self.model.generate(
            **self.inputs,
            **row.settings(),
            max_new_tokens=new,
            do_sample=False,
            stopping_criteria=[clock, *also],
        )
        peak = torch.cuda.max_memory_allocated(self.device) - before if on_gpu else None
        at = clock.times_s
        steps = [1e3 * (b - a) for a, b in pairwise(at)]
        return {"ttft_ms": 1e3 * (at[0] - begin), "steps_ms": steps, "peak_bytes": peak}

    def _summary(self, calls: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        last, first = calls[-1], calls[0]
        after = [sorted(call["steps_ms"][WARM_TOKENS:]) for call in (first, last)]
        ms = [steps[len(steps) // 2] for steps in after]
        return {
            "ttft_ms": min(call["ttft_ms"] for call in calls[1:]),
            "first_ttft_ms": first["ttft_ms"],
            "ms_per_token": ms[1],
            "first_ms_per_token": ms[0],
            "longest_ms": after[1][-1],
            "first_step_ms": last["steps_ms"][0],
            "tokens_per_s": 1e3 * self.load.batch / ms[1],
            "peak_bytes": max((c["peak_bytes"] for c in calls), default=0) if self._gpu else None,
            "calls": [
                {"ttft_ms": call["ttft_ms"], "first_steps_ms": call["steps_ms"][:4]}
                for call in calls
            ],
        }

    @property
    def _gpu(self) -> bool:
        return self.device.type == "cuda"

    def _idle(self, row: Row) -> float | None:
        """Share of a step's time in which no kernel runs; None without a GPU."""
        if not self._gpu:
            return None
        profiled = _Profiled(self.device)
        self._call(row, WARM_TOKENS + 2 * PROFILED, [profiled])
        return profiled.idle


class _Profiled:
    """A stopping criterion that profiles `PROFILED` steps after the warm ones."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.idle = device, math.nan
        self._steps = 0
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._steps += 1
        if self._steps == WARM_TOKENS:
            self._profile.__enter__()
            torch.cuda.synchronize(self.device)
            self._begin = perf_counter()
        elif self._steps == WARM_TOKENS + PROFILED:
            torch.cuda.synchronize(self.device)
            wall_us = 1e6 * (perf_counter() - self._begin)
            self._profile.__exit__(None, None, None)
            found = self._profile.key_averages()
            busy = sum(event.self_device_time_total for event in found)
            self.idle = max(0.0, 1 - busy / wall_us)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def header(bench: Bench) -> dict[str, Any]:
    """Header of a result file, without rows yet."""
    config = bench.model.config.get_text_config(decoder=True)
    return {
        "schema": SCHEMA,
        **stamp(bench.device),
        "method": METHOD,
        "model": bench.name,
        "weights": bench.weights,
        "prompt_tokens": bench.inputs["input_ids"].shape[1],
        "q_heads": config.num_attention_heads,
        "kv_heads": config.num_key_value_heads,
        "layers": config.num_hidden_layers,
        "dtype": str(bench.model.dtype).removeprefix("torch."),
        "load": asdict(bench.load),
        "rows": [],
    }
