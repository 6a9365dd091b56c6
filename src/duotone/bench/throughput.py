"""Throughput under a memory budget: the papers' experiment (CalibQuant, Tables 5-8).

Weights are random and have the real shapes. Each row and budget gets the largest batch that really
runs inside the budget, with its caches, a prefill and captured decode steps.

    decode     `STEPS` steps around the middle and `STEPS` before the end of the generation, each
               with its caches at that length. Times are linear in the tokens, so a step in the
               middle has the average cost. Flushes of the stream are included.
    prefill    one sequence at a time, quantization included, with all caches of the batch already
               there; times the batch
    overall    sequences / (prefill + generated tokens x time of a step in the middle)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from duotone.bench.budget import attempt, check_budget, largest_batch, memory_limit, release
from duotone.bench.caches import BenchCache, DenseCache, NoCache, PackedCache
from duotone.bench.decode_loop import DecodeLoop, wait
from duotone.bench.language import LanguageModel
from duotone.bench.library_cache import LibraryCache
from duotone.bench.throughput_rows import ROWS, Row
from duotone.planning.capacity import activation_bytes, predict, read_bytes
from duotone.planning.shapes import DecoderShape, Load
from duotone.planning.step_time import Machine
from duotone.report.files import read_file
from duotone.report.provenance import stamp, write_new_json

SCHEMA = "duotone.throughput/1"
# Decode steps per point: a whole number of groups of 32, so that flushes count at their rate.
STEPS = 32
# What batches are rounded down to where that is faster.
BATCH_MULTIPLE = 64
PREFILL_RUNS = 1
PROMPT_TOKENS, NEW_TOKENS = 128, 500


@dataclass(frozen=True)
class Configuration:
    """One measurement: a row of ROWS on a model, tokens per sequence, a budget."""

    row: str
    visual: int
    budget_bytes: int
    prompt: int = PROMPT_TOKENS
    new: int = NEW_TOKENS

    @property
    def load(self) -> Load:
        """Tokens of every sequence."""
        return Load(self.visual, self.prompt, self.new)

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> Configuration:
        """Return what a result measured. Errors: ValueError for anything but its result file."""
        try:
            if result["schema"] == SCHEMA:
                return cls(**result["configuration"])
        except (LookupError, TypeError):
            pass
        raise ValueError(
            f"a result of throughput is an object of schema {SCHEMA!r} with the fields of its "
            f"configuration; got {str(result)[:200]}. Is this another benchmark's?"
        )

    def path(self, folder: Path, model: str) -> Path:
        """Path of the result, before it is a line of the model's .jsonl."""
        row = self.row.replace(", ", "_").replace(" ", "-")
        return folder / model / f"n{self.visual}_{self.budget_bytes / 1e9:g}GB_{row}.json"


class Bench:
    """One model on one device; `measure` runs configurations on it.

    shape: of the model. device: a GPU, or a CPU for tests. machine: rates for predictions and
    rooflines; measured on a GPU if None. impl: of `decode_attention`. fuse: of `LanguageModel`.
    """

    def __init__(
        self,
        shape: DecoderShape,
        device: torch.device,
        max_tokens: int,
        machine: Machine | None = None,
        impl: str = "auto",
        fuse: bool = True,
    ) -> None:
        self.shape, self.device, self.impl = shape, device, impl
        self.max_tokens, self.fuse = max_tokens, fuse
        self.machine = machine or measured_machine(device)
        self.load("bf16")

    def load(self, weights: str) -> None:
        """Load these weights for all later rows; free the previous weights."""
        self.model = None
        release()
        self.model = LanguageModel(self.shape, self.device, self.max_tokens, self.fuse, weights)
        release()
        on_gpu = self.device.type == "cuda"
        # Includes the allocator's rounding; later left-overs of rows count in their budgets.
        reserved = torch.cuda.memory_reserved(self.device) if on_gpu else 0
        self.weights_bytes = reserved or self.model.nbytes

    @torch.inference_mode()
    def measure(self, at: Configuration) -> dict[str, Any]:
        """The result file of one configuration. Errors: ValueError for an unknown row."""
        if at.row not in ROWS:
            raise ValueError(f"rows are {list(ROWS)}; got {at.row!r}.")
        row = ROWS[at.row]
        if row.weights != self.model.weights:
            self.load(row.weights)
        given = (self.shape, row.cache, at.load, at.budget_bytes, self.machine)
        guess = predict(*given, weights=row.weights)
        started = time.perf_counter()
        with memory_limit(self.device, self.weights_bytes, at.budget_bytes):
            found = largest_batch(lambda batch: self._trial(at, row, batch), guess.max_batch)
            chosen = None if found is None else self._faster(at, row, *found)
        result = self._header(at, row)
        if row.library is None:
            result["predicted"] = guess.to_dict()
        if found is None:
            return result | {"batch": 0, "wall_s": time.perf_counter() - started}
        batch, measured = chosen
        result |= {"largest_batch": found[0], "batch": batch}
        result |= {**measured, **_rates(at, batch, measured)}
        if row.library is None:
            at_batch = predict(*given, batch, row.weights)
            result |= {"predicted_step_s": at_batch.step_s, "roofline_s": at_batch.roofline_s}
            result["roofline_share"] = at_batch.roofline_s / measured["step_s"]
        return result | {"wall_s": time.perf_counter() - started}

    def _header(self, at: Configuration, row: Row) -> dict[str, Any]:
        header = {
            "schema": SCHEMA,
            **stamp(self.device),
            "model": asdict(self.shape),
            "configuration": asdict(at),
            "spec": None if row.cache is None or row.library else row.cache.to_dict(),
            "weights": self.model.weights,
            "machine": asdict(self.machine),
            "weight_bytes": self.model.nbytes,
            "dense_sequence_bytes": read_bytes(self.shape, None, at.load).total,
        }
        if row.library is not None:
            return header
        middle = read_bytes(self.shape, row.cache, replace(at.load, new=at.new // 2))
        whole = read_bytes(self.shape, row.cache, at.load)
        return header | {"sequence_bytes": whole.total, "read_bytes": asdict(middle)}

    def _trial(self, at: Configuration, row: Row, batch: int) -> dict[str, Any]:
        """Run a batch once; raises torch.OutOfMemoryError where it does not fit."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        cache = self._cache(at, row, batch)
        needed = cache.nbytes + activation_bytes(self.shape, row.cache, at.load, batch)
        check_budget(self.device, needed, at.budget_bytes)
        prefill_s = self._prefill_seconds(cache, at.load)
        release()
        start = at.visual + at.prompt
        # The rest of a step: the cost of attention is the difference.
        alone = DecodeLoop(self.model, NoCache(), batch, start)
        alone.capture(0)
        alone_s = alone.seconds_per_step(0, min(STEPS, at.new))
        del alone
        loop = DecodeLoop(self.model, cache, batch, start)
        steps = min(STEPS, at.new)
        times = {}
        for name, centre in (("step_s", at.new // 2), ("last_step_s", at.new - steps // 2)):
            # A graph of the 16-bit cache has one length: that of the point's middle.
            loop.capture(centre if isinstance(cache, DenseCache) else centre - steps // 2)
            times[name] = loop.seconds_per_step(centre - steps // 2, steps)
        return {
            **times,
            "step_without_attention_s": alone_s,
            "prefill_s_per_sequence": prefill_s,
            "cache_bytes": cache.nbytes,
            "attention": cache.attention,
            "peak_bytes": _peak_bytes(self.device, self.weights_bytes),
        }

    def _faster(
        self, at: Configuration, row: Row, batch: int, measured: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        """A smaller batch that is a multiple of `BATCH_MULTIPLE`, if it has more tokens per second.

        Products go in tiles of so many rows: one sequence beyond can cost as much as a tile.
        """
        whole = batch // BATCH_MULTIPLE * BATCH_MULTIPLE
        if whole in (0, batch):
            return batch, measured
        fewer = attempt(lambda size: self._trial(at, row, size), whole)
        if fewer is None or whole / fewer["step_s"] <= batch / measured["step_s"]:
            return batch, measured
        return whole, fewer

    def _cache(self, at: Configuration, row: Row, batch: int) -> BenchCache:
        given = (at.load, batch, self.device, self.model.dtype)
        if row.library is not None:
            return LibraryCache(self.shape, row.library, *given)
        if row.cache is None:
            return DenseCache(self.shape, *given)
        return PackedCache(self.shape, row.cache, *given, self.impl)

    def _prefill_seconds(self, cache: BenchCache, load: Load) -> float:
        """Seconds of one sequence's prefill, after a warm-up."""
        prompt = torch.randint(self.shape.vocab, (load.visual + load.prompt,), device=self.device)
        self.model.prefill(prompt, cache.take_prompt)
        wait(self.device)
        began = time.perf_counter()
        for _ in range(PREFILL_RUNS):
            self.model.prefill(prompt, cache.take_prompt)
        wait(self.device)
        return (time.perf_counter() - began) / PREFILL_RUNS


def _rates(at: Configuration, batch: int, measured: dict[str, Any]) -> dict[str, float]:
    prefill_s = batch * measured["prefill_s_per_sequence"]
    decode_s = at.new * measured["step_s"]
    return {
        "prefill_s": prefill_s,
        "decode_tokens_per_s": batch / measured["step_s"],
        "sequences_per_s": batch / (prefill_s + decode_s),
    }


def _peak_bytes(device: torch.device, weights: int) -> int | None:
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_reserved(device) - weights


def measured_machine(device: torch.device) -> Machine:
    """Copy bandwidth and 16-bit products of a GPU; the defaults (an H200's) elsewhere."""
    if device.type != "cuda":
        return Machine()
    source = torch.empty(1 << 30, dtype=torch.float32, device=device).normal_()
    target = torch.empty_like(source)
    copy_s = _device_seconds(lambda: target.copy_(source))
    copied = 2 * source.nbytes
    del source, target
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=device) for _ in range(2))
    product_s = _device_seconds(lambda: a @ b)
    del a, b
    release()
    return Machine(copied / copy_s, 2 * 8192**3 / product_s)


def _device_seconds(work: Callable[[], object], runs: int = 10) -> float:
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(runs):
        work()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / runs


def merged(folder: Path, model: str) -> list[Configuration]:
    """Return what the lines of `folder`/MODEL.jsonl measured; nothing where there is no such file.

    Errors: ValueError for a line that is no result of throughput.
    """
    path = folder / f"{model}.jsonl"
    return [Configuration.of(result) for result in read_file(path)] if path.exists() else []


def run(
    bench: Bench, configurations: list[Configuration], folder: Path, minutes: float | None = None
) -> Iterator[tuple[Configuration, dict[str, Any] | None]]:
    """Measure configurations without a result, one after the other, until the time is over.

    Yields (configuration, result); None where a file or a line of MODEL.jsonl exists already. A
    configuration that has begun is finished.
    """
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    done = merged(folder, bench.shape.name)
    # Configurations with the same weights follow each other.
    for at in sorted(configurations, key=lambda one: ROWS[one.row].weights):
        path = at.path(folder, bench.shape.name)
        if at in done or path.exists():
            yield at, None
            continue
        if deadline is not None and time.monotonic() > deadline:
            return
        result = bench.measure(at)
        write_new_json(path, result)
        yield at, result
