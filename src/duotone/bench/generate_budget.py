"""`duotone bench generate --budget`: rows of `model.generate` with the largest batch that fits.

The model reads one sequence at a time, as a server does. Then `model.generate` goes on with a batch
of copies of its cache.

    fits      at the end of the answer, by a limit of the allocator (`bench.budget`); and by sums,
              while the last sequence is read beside all others
    step      mean of steps around the middle of the answer, flushes of a stream included: times
              are linear in the tokens, so this is the average step
    read      one sequence by the whole model, vision tower and quantization included; the second
              one of its length. Times the batch
    answers   batch x new tokens / (batch x read + new tokens x step)
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from time import perf_counter
from typing import Any

import torch

from duotone.bench.batch_search import largest_fitting
from duotone.bench.budget import attempt, check_budget, memory_limit, release
from duotone.bench.generate import Bench, sizes
from duotone.bench.generate_rows import Row
from duotone.bench.generate_watch import WARM_TOKENS
from duotone.bench.sequences import Prompts, Read, Steps, go_on, read
from duotone.report.provenance import stamp

SCHEMA = "duotone.generate-budget/1"
METHOD = (
    "model.generate, greedy, from a cache of copies of one sequence that the model has read; the "
    "largest batch that fits the budget at the end of the answer, or a smaller one that has more "
    "tokens/s (a multiple of 64; of a cache that grows, nine tenths); step: mean of 32 in the "
    "middle of the answer; read: one sequence, warm, times the batch; peak: of the last steps, "
    "without the weights"
)
# Steps that are timed: a whole number of groups of a stream, so that flushes count at their rate.
TIMED = 32
STEPS = WARM_TOKENS + TIMED
# Tokens of a trial beyond a stream's group: enough for a capture and a growth of every buffer.
TRIAL_TOKENS = 8
# Products go in tiles of so many rows: one sequence beyond can cost as much as a tile.
BATCH_MULTIPLE = 64
# Share of a batch that leaves a cache that grows some memory: the allocator has less to do then.
SLACK = 0.9
# Share of the budget that caches take in a first guess; of a batch, where its steps run out later.
FIRST_GUESS, LATER = 0.92, 0.97


@dataclass(frozen=True)
class Answers:
    """Tokens of every sequence: visual ones and text of its prompt, generated ones.

    Errors: ValueError for fewer new tokens than a measurement takes.
    """

    visual: int
    prompt: int = 128
    new: int = 500

    def __post_init__(self) -> None:
        if self.new < STEPS:
            raise ValueError(f"--new-tokens with --budget must be at least {STEPS}; got {self.new}")


@dataclass(frozen=True)
class Ready:
    """Sequences at three points of an answer, which all budgets of a row share.

    trial: tokens from `end` to the end. held_bytes: of the process, with these sequences and the
    weights.
    """

    row: Row
    prompt: Read
    middle: Read
    end: Read
    trial: int
    held_bytes: int

    def most(self, budget_bytes: int) -> int:
        """Sequences of which the last one can be read beside the others."""
        return max(0, 1 + (budget_bytes - self.prompt.peak_bytes) // self.prompt.nbytes)


class BudgetBench:
    """Rows of one subject in memory budgets, all with the same answers."""

    def __init__(self, bench: Bench, prompts: Prompts, answers: Answers) -> None:
        self.bench, self.prompts, self.answers = bench, prompts, answers
        self.model, self.device = bench.model, bench.device
        self._name: str | None = None
        self._ready: Ready | None = None
        # Budget and largest batch of the row's last measurement.
        self._last: tuple[int, int] | None = None
        self._peak = 0

    def row(self, row: Row, budget_bytes: int) -> dict[str, Any]:
        """Measure a row in one budget; where it cannot run, its "reason" instead."""
        if row.name != self._name:
            self._name, self._ready, self._last = row.name, None, None
            release()
        begin = perf_counter()
        found = self.bench.row(row, lambda one: self._measure(one, budget_bytes))
        return {**found, "wall_s": perf_counter() - begin}

    def header(self, budget_bytes: int) -> dict[str, Any]:
        """Header of a budget's result file, without rows yet."""
        answers = self.answers
        return {
            "schema": SCHEMA,
            **stamp(self.device),
            "method": METHOD,
            "model": self.bench.subject.name,
            "visual_tokens": answers.visual,
            "prompt_tokens": answers.prompt,
            "new_tokens": answers.new,
            "budget_bytes": budget_bytes,
            **sizes(self.model),
            "rows": [],
        }

    def _measure(self, row: Row, budget_bytes: int) -> dict[str, Any]:
        if self._ready is None:
            self._ready = self._read_all(row)
        with memory_limit(self.device, self._ready.held_bytes, budget_bytes):
            largest = self._largest(budget_bytes)
            timed = self._timed(largest) if largest else None
        return {"batch": 0} if timed is None else self._rates(largest, *timed)

    def _read_all(self, row: Row) -> Ready:
        new = self.answers.new
        trial = min(new, TRIAL_TOKENS + (0 if row.spec is None else row.spec.flush_tokens))
        end, middle = self._read(row, new - trial), self._read(row, self._middle_at)
        # The first prompt of a length is slower: libraries plan for it.
        for _ in range(2):
            prompt = self._read(row, 0)
        release()
        on_gpu = self.device.type == "cuda"
        held = torch.cuda.memory_reserved(self.device) if on_gpu else 0
        return Ready(row, prompt, middle, end, trial, held)

    @property
    def _middle_at(self) -> int:
        """Tokens of an answer before the steps in its middle."""
        return (self.answers.new - STEPS) // 2

    def _read(self, row: Row, generated: int) -> Read:
        """Let the model read a prompt and so many tokens of its answer."""
        prompt = self.prompts(self.answers.visual, self.answers.prompt + generated)
        return read(self.model, row, prompt)

    def _largest(self, budget_bytes: int) -> int:
        """The largest batch whose answers end within the budget; 0: none."""
        ready, most = self._ready, self._ready.most(budget_bytes)
        if self._last is None:
            guess = int(FIRST_GUESS * budget_bytes / ready.end.nbytes)
        else:
            guess = int(self._last[1] * budget_bytes / self._last[0])

        def trial(batch: int) -> dict[str, int]:
            check_budget(batch * ready.end.nbytes, budget_bytes)
            given = (ready.row, ready.end, batch, ready.trial, ready.trial)
            peak = go_on(self.model, *given, compiled=False).peak_bytes
            # Gaps between weights are reserved already, so the limit lets caches into them.
            check_budget(peak, budget_bytes)
            return {"peak_bytes": peak}

        one = ready.end.nbytes
        found = largest_fitting(trial, guess, most, budget_bytes, one) if most else None
        if found is None:
            return 0
        self._last, self._peak = (budget_bytes, found[0]), found[1]["peak_bytes"]
        return found[0]

    def _timed(self, batch: int) -> tuple[int, Steps] | None:
        """(batch, steps in the middle of an answer): of this batch, or of a smaller one."""
        while (steps := self._attempt(batch)) is None:
            batch = min(batch - 1, int(LATER * batch))
            if not batch:
                return None
        found = {batch: steps}
        for fewer in self._fewer(batch):
            if (steps := self._attempt(fewer)) is not None:
                found[fewer] = steps
        return max(found.items(), key=lambda one: one[0] / _step_s(one[1]))

    def _fewer(self, batch: int) -> set[int]:
        """Smaller batches that may have more tokens per second."""
        fewer = {batch // BATCH_MULTIPLE * BATCH_MULTIPLE}
        if self._ready.row.spec is None:
            fewer.add(int(SLACK * batch))
        return fewer - {0, batch}

    def _attempt(self, batch: int) -> Steps | None:
        """Steps in the middle of an answer, or None where memory runs out."""
        row, middle = self._ready.row, self._ready.middle
        left = self.answers.new - self._middle_at

        def run(size: int) -> Steps:
            return go_on(self.model, row, middle, size, STEPS, left)

        steps = attempt(run, batch)
        # Without a cache of ours, torch plans for every length that it has not seen.
        if steps is not None and row.spec is None and self.device.type == "cuda":
            steps = attempt(run, batch)
        return steps

    def _rates(self, largest: int, batch: int, steps: Steps) -> dict[str, Any]:
        ready, new, step_s = self._ready, self.answers.new, _step_s(steps)
        notes = list(steps.notes)
        if steps.eager is not None:
            notes.append(f"steps are launched one by one: {steps.eager}")
        return {
            "batch": batch,
            "largest_batch": largest,
            "step_ms": 1e3 * step_s,
            "tokens_per_s": batch / step_s,
            "read_s": ready.prompt.seconds,
            "answer_tokens_per_s": batch * new / (batch * ready.prompt.seconds + new * step_s),
            "sequence_bytes": ready.end.nbytes,
            "peak_bytes": self._peak if self.device.type == "cuda" else None,
            "notes": notes,
        }


def _step_s(steps: Steps) -> float:
    return fmean(steps.seconds[-TIMED:])
