"""`tune`: samples, one 16-bit pass, sensitivity, search, and the held-out report, in this order."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from duotone import CacheSpec
from duotone.evaluate.loader import encoded_task
from duotone.evaluate.records import describe
from duotone.hf.model.facts import ModelFacts
from duotone.hf.model.spec_checks import check_spec
from duotone.inference.encoded import EncodedPrompts, TextFile, encoded_if_text
from duotone.loading import Loaded
from duotone.planning.memory import plan
from duotone.report.provenance import device_name, stamp
from duotone.tasks import Task

from .batches import PromptCounts, facts_of, prompt_counts, ready
from .bits import BitsOf
from .build import spec_of
from .front import best_within
from .kept import json_object, reading
from .objective import Ready
from .samples import HELD_OUT, Parts, split_task
from .search import JOURNAL, Search, Tried, need_optuna
from .seeds import known_specs, seed_points
from .sensitivity import Sensitivity, measure_sensitivity
from .settings import TuneSettings, check_resumable, remember
from .space import Space, merged, prefixed, space_for
from .trials import Meter

# Called with (stage, done, total); total None where only time ends the stage.
Progress = Callable[[str, int, int | None], None]
MakeReady = Callable[[Any, dict[str, Any], int], Ready]
# Share of the granted minutes for the search and all before it; the rest is for the report.
SEARCH_SHARE = 0.6


class OutOfReachError(ValueError):
    """Error of a budget that no spec meets, or that none was found within."""


def _all(spec: CacheSpec) -> bool:
    """Take every spec."""
    return True


def _silent(stage: str, done: int, total: int | None) -> None:
    """Ignore progress."""


@dataclass
class Tuned:
    """Result of a search. chosen: the best trial within `budget_bits`."""

    chosen: Tried
    budget_bits: float
    tried: list[Tried]
    sensitivity: Sensitivity
    space: Space
    of: BitsOf
    pruned: int
    seconds: float


@dataclass
class Job:
    """One search: a loaded model, tasks in two disjoint parts, settings, and the output folder."""

    loaded: Loaded
    parts: Sequence[Parts]
    settings: TuneSettings
    out: Path
    progress: Progress = _silent
    started: float = field(default_factory=monotonic)
    # Of an encoded batch: the batch with the answers that its caches are compared with.
    make_ready: MakeReady = ready
    # True for a spec that may be chosen; more than a budget on the samples decides.
    takes: Callable[[CacheSpec], bool] = _all
    # Questions of the batches made last are read after their pictures, in a step of their own.
    later_question: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        need_optuna()
        size = self.settings.batch_size
        self.encoded = {p.search.name: self.encode(p.search, size) for p in self.parts}
        everything = [batch for batches in self.encoded.values() for batch in batches]
        self.facts: ModelFacts = facts_of(self.loaded.model, everything)
        self.counts: PromptCounts = prompt_counts(self.loaded, everything)
        self.of: BitsOf = self._bits_of()
        spans = self.counts.all_pictured
        self.space = space_for(
            self.facts.layers,
            visual=spans,
            text=self.of == "cache",
            portable=self.settings.portable,
        )
        self._check_reach()
        # Before the folder exists: a new file in the tree would make the commit a dirty one.
        self.header = stamp(self.loaded.model.device)
        kept = self.all_settings()
        if not check_resumable(self.out, kept):
            remember(self.out, kept)

    def encode(self, task: Task, batch_size: int) -> list[dict[str, Any]]:
        """A task's prompts as tensors."""
        batches = encoded_task(self.loaded, task, HELD_OUT, task.size, batch_size)
        return [encoded for _, encoded in batches]

    def _bits_of(self) -> BitsOf:
        asked = self.settings.bits_of
        if asked == "visual" and not self.counts.all_pictured:
            raise ValueError(
                "bits_of='visual' needs samples that all have pictures; use --bits-of cache"
            )
        return asked or ("visual" if self.counts.all_pictured else "cache")

    def all_settings(self) -> dict[str, Any]:
        """Settings that must equal the settings of the search to go on with."""
        return {
            **self.settings.to_dict(),
            "bits_of": self.of,
            "model": describe(self.loaded.model, self.loaded.name),
            "device": device_name(self.loaded.model.device),
            "space": self.space.digest,
            "tasks": [part.evidence for part in self.parts],
        }

    @property
    def dense_bytes(self) -> float:
        """16-bit bytes per sequence of the budget's tokens, from the prompts alone."""
        tokens = self.counts.visual + (self.counts.text if self.of == "cache" else 0)
        return tokens * self.facts.elements * 2

    @property
    def budget_bits(self) -> float:
        """The budget in true bits per number."""
        if self.settings.budget_bits is not None:
            return self.settings.budget_bits
        return 16 * self.settings.budget_bytes / self.dense_bytes

    def predict(self, spec: CacheSpec) -> float:
        """Lower bound of the spec's bits, without a model; 0 where windows decide.

        Errors: ValueError for a spec that does not fit the model.
        """
        check_spec(self.facts, spec)
        by_spans = spec.visual != "text"
        kind = "visual_tokens" if by_spans else "text_tokens"
        made = plan(self.facts, spec, **{kind: max(1, self.counts.visual or self.counts.text)})
        return made.bits_per_element if by_spans and self.of == "visual" else 0.0

    def _check_reach(self) -> None:
        least = min(map(self._planned_bits, self._thrifty()))
        if self.budget_bits < least:
            raise OutOfReachError(
                f"the budget must be within reach: the space's smallest caches take {least:.2f} "
                f"true bits on these samples, got {self.budget_bits:.3f}; give a larger budget"
            )

    def _thrifty(self) -> list[CacheSpec]:
        """Specs of the space with the least bits; which groups fit in depends on the prompts."""
        both, layers = ("key", "value"), self.facts.layers
        text = {"text_bits": 2} if self.of == "cache" else {}
        spans = merged(prefixed(both, top=1, first=1), text)
        streams = [
            merged(prefixed(both, top=1, group=group, along="tokens"), prefixed("key", first=1))
            for group in (32, 64, 128, 256)
        ]
        points = [spans] if self.counts.all_pictured else streams
        return [spec_of(self.space.point(**point), layers) for point in points]

    def _planned_bits(self, spec: CacheSpec) -> float:
        """True bits of a spec on the mean prompt, answers included where the budget has them."""
        tokens = {"visual_tokens": self.counts.visual} if self.counts.visual else {}
        if self.of == "cache":
            tokens["text_tokens"] = self.counts.text
            tokens["new_tokens"] = max(p.search.max_new_tokens for p in self.parts) - 1
        return plan(self.facts, spec, **tokens).bits_per_element

    def prefilled(self, encoded: Mapping[str, list], stage: str) -> dict[str, list[Ready]]:
        """The 16-bit pass over all batches."""
        total, done = sum(map(len, encoded.values())), 0
        tasks = {part.search.name: part.search for part in self.parts}
        made: dict[str, list[Ready]] = {}
        for name, batches in encoded.items():
            made[name] = []
            for batch in batches:
                limit = tasks[name].max_new_tokens
                made[name].append(self.make_ready(self.loaded.model, batch, limit))
                done += 1
                self.progress(stage, done, total)
        steps = [one.batch.pictures_end for batches in made.values() for one in batches]
        self.later_question = all(steps)
        return made

    def meter(self, batches: Mapping[str, list[Ready]]) -> Meter:
        """Meter that measures specs on prefilled batches."""
        return Meter(self.loaded.model, batches, self.of)

    def sensitivity(self, batches: Mapping[str, list[Ready]]) -> Sensitivity:
        """Sensitivity, measured on the first batch of every task or read back."""
        kept = self.out / "sensitivity.json"
        if kept.exists():
            with reading(kept):
                return Sensitivity.from_dict(json_object(kept), self.facts.layers)
        found = measure_sensitivity(
            self.loaded.model,
            [parts[0] for parts in batches.values()],
            self.facts.layers,
            spans=self.counts.all_pictured,
            of=self.of,
            progress=lambda done, total: self.progress("sensitivity", done, total),
        )
        kept.write_text(json.dumps(asdict(found)), encoding="utf-8")
        return found

    def search(self, trials: int | None = None, minutes: float | None = None) -> Tuned:
        """Run or go on with the search, within `minutes` of the job's beginning."""
        batches = self.prefilled(self.encoded, "16-bit answers")
        sensitivity = self.sensitivity(batches)
        search = Search(
            self.space,
            self.meter(batches),
            sensitivity.ranking,
            self.settings.ceiling * self.budget_bits,
            seeds=seed_points(self.space),
            seed=self.settings.seed,
            sampler=self.settings.sampler,
            storage=self.out / JOURNAL,
            predict=self.predict,
        )
        self._first_known(search)
        left = None if minutes is None else SEARCH_SHARE * 60 * minutes - self.elapsed
        search.run(trials, left, lambda done, total: self.progress("search", done, total))
        return self._tuned(search, sensitivity)

    @property
    def known(self) -> dict[str, CacheSpec]:
        """{label: spec} of the known schemes that may be chosen here."""
        fitting = known_specs(self.facts, has_pictures=self.counts.all_pictured)
        return {label: spec for label, spec in fitting.items() if self.takes(spec)}

    def _first_known(self, search: Search) -> None:
        known = known_specs(self.facts, has_pictures=self.counts.all_pictured)
        for done, _ in enumerate(search.consider(known), start=1):
            self.progress("published schemes", done, len(known))

    @property
    def elapsed(self) -> float:
        """Seconds since the job began."""
        return monotonic() - self.started

    def _tuned(self, search: Search, sensitivity: Sensitivity) -> Tuned:
        # What the samples prove nothing of is no choice, however near it is. A spec that is not
        # taken shows the sampler a direction.
        taken = [tried for tried in search.tried if self.takes(tried.spec)]
        proved = [tried for tried in taken if not tried.outcome.unproved]
        points = [(tried.outcome.bits, tried.outcome.score) for tried in proved]
        best = best_within(points, self.budget_bits)
        if best is None:
            raise OutOfReachError(self._nothing_found(search, taken, len(proved)))
        pruned = search.done - sum(tried.number >= 0 for tried in search.tried)
        return Tuned(
            proved[best],
            self.budget_bits,
            proved,
            sensitivity,
            self.space,
            self.of,
            pruned,
            self.elapsed,
        )

    def _nothing_found(self, search: Search, taken: Sequence[Tried], proved: int) -> str:
        within = [t for t in taken if t.outcome.bits <= self.budget_bits]
        found = f"no spec within {self.budget_bits:.2f} true bits was found in {search.done} trials"
        if not within:
            return f"{found}; run the command again with more --minutes to go on"
        return (
            f"{found} whose codes were ever read: {within[0].outcome.unproved}, and so for "
            f"{len(taken) - proved} specs. Give longer samples or answers, or a smaller "
            "budget, which shorter windows meet"
        )


def make_job(
    loaded: Loaded,
    tasks: Sequence[Task | EncodedPrompts | TextFile],
    settings: TuneSettings,
    out: str | Path,
    progress: Progress | None = None,
) -> Job:
    """Split the tasks and check everything that can be checked before the model runs.

    Errors: ValueError for too few samples, a budget out of reach, a folder of another search, or a
    model that cannot be tuned. ImportError without Optuna.
    """
    tasks = [encoded_if_text(loaded, task) for task in tasks]
    parts = [split_task(task, settings.samples, settings.heldout) for task in tasks]
    return Job(loaded, parts, settings, Path(out), progress or _silent)
