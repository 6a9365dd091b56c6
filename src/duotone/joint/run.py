"""A search over pairs: per recipe a model, a budget, the search of `tune`, held-out numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any

from duotone.evaluate.loader import encoded_task
from duotone.evaluate.records import describe
from duotone.loading import Loaded
from duotone.quant import CacheSpec
from duotone.report.provenance import device_name, stamp
from duotone.tasks import Task
from duotone.tune import Tuned
from duotone.tune.batches import facts_of
from duotone.tune.heldout import Rows, measure_all
from duotone.tune.report import CHOSEN
from duotone.tune.run import Job, OutOfReachError, Progress
from duotone.tune.samples import HELD_OUT, Parts, split_task
from duotone.tune.search import need_optuna
from duotone.tune.settings import check_resumable, remember
from duotone.tune.verdict import Verdict, verdict

from .answers import Answers
from .models import check_tasks, model_of
from .settings import JointSettings
from .shares import DENSE, Load, Share, shares, usual_of

SEARCH = "search"
# Label of the cache that stays as it is.
SIXTEEN = "16-bit"


@dataclass(frozen=True)
class Pair:
    """Weights by one recipe with the cache that is kept beside these.

    rows: {label: {task: measured}} on held-out samples, 16-bit caches among these. end: of the
    found spec against presets; None where 16-bit caches fit. trials: of the search.
    """

    share: Share
    label: str
    specs: Mapping[str, CacheSpec]
    rows: Mapping[str, Rows]
    end: Verdict | None = None
    trials: int = 0

    @property
    def spec(self) -> CacheSpec:
        """The spec that is kept."""
        return self.specs[self.label]


@dataclass
class Joint:
    """One search over pairs. loading: loads the 16-bit model anew, per recipe."""

    loading: Callable[[], Loaded]
    parts: Sequence[Parts]
    settings: JointSettings
    out: Path
    progress: Progress
    answers: Answers = field(default_factory=Answers)
    started: float = field(default_factory=monotonic)

    def __post_init__(self) -> None:
        base = self.loading()
        self.header = stamp(base.model.device)
        size = self.settings.batch_size
        tasks = [task for part in self.parts for task in (part.search, part.heldout)]
        encoded = {i: self._encoded(base, task, size) for i, task in enumerate(tasks)}
        searched = [batch for i in range(0, len(tasks), 2) for batch in encoded[i]]
        new = max(part.search.max_new_tokens for part in self.parts)
        usual = usual_of(searched, base.model.config, new - 1, self.settings.tokens)
        facts = facts_of(base.model, searched)
        self.load = Load(facts, self.settings.sequences, usual)
        self.shares = shares(base.model, self.load, self.settings)
        self._check_room()
        self.kept_settings = {
            **self.settings.to_dict(),
            "model": describe(base.model, base.name),
            "device": device_name(base.model.device),
            "tasks": [part.evidence for part in self.parts],
        }
        if not check_resumable(self.out, self.kept_settings):
            remember(self.out, self.kept_settings)
        batches = [(task, batch) for i, task in enumerate(tasks) for batch in encoded[i]]
        for done, (task, batch) in enumerate(batches, start=1):
            self.answers.add(base.model, batch, task.max_new_tokens)
            self.progress("16-bit answers", done, len(batches))

    @staticmethod
    def _encoded(base: Loaded, task: Task, size: int) -> list[dict[str, Any]]:
        return [one for _, one in encoded_task(base, task, HELD_OUT, task.size, size)]

    def _check_room(self) -> None:
        if all(share.why for share in self.shares):
            said = "; ".join(f"{share.recipe}: {share.why}" for share in self.shares)
            raise ValueError(
                "some recipe's weights must leave memory for caches; "
                f"{said}. Give more --memory, fewer --sequences or --tokens, or other --weights"
            )

    def search(self, trials: int | None = None, minutes: float | None = None) -> list[Pair]:
        """Find the best cache beside each recipe's weights. trials: per recipe.

        minutes: for all recipes and the report, shared alike; recipes without a search leave
        theirs to others.
        Errors: ValueError where no recipe has a cache within its budget.
        """
        pairs: list[Pair] = []
        usable = sorted((s for s in self.shares if not s.why), key=lambda s: not s.is_dense)
        for done, share in enumerate(usable):
            left = None if minutes is None else minutes - (monotonic() - self.started) / 60
            own = None if left is None else max(0.0, left / (len(usable) - done))
            try:
                pairs.append(self._pair(share, trials, own))
            except OutOfReachError as error:
                self._leave_out(share, error)
        self._check_room()
        return pairs

    def _leave_out(self, share: Share, error: OutOfReachError) -> None:
        self.shares[self.shares.index(share)] = replace(share, why=str(error))

    def _pair(self, share: Share, trials: int | None, minutes: float | None) -> Pair:
        started = monotonic()
        folder = self.out / share.recipe
        stage = partial(self.progress, f"{share.recipe}: weights")
        tasks = [part.search for part in self.parts]
        loaded = model_of(
            share.recipe, self.loading, tasks, self.settings.batch_size, folder, stage
        )
        job = self._job(share, loaded, folder, started)
        if share.is_dense:
            rows = self._heldout(job, {SIXTEEN: DENSE})
            return Pair(share, SIXTEEN, {SIXTEEN: DENSE}, rows)
        return self._compared(share, job, job.search(trials, minutes))

    def _job(self, share: Share, loaded: Loaded, folder: Path, started: float) -> Job:
        """A search whose specs fit the memory at the length of the load, too."""

        def takes(spec: CacheSpec) -> bool:
            return self.load.caches_bytes(spec) <= share.caches_bytes

        def progress(stage: str, done: int, total: int | None) -> None:
            self.progress(f"{share.recipe}: {stage}", done, total)

        settings = self.settings.tune_settings(share.bits)
        given = (loaded, self.parts, settings, folder / SEARCH, progress, started)
        return Job(*given, make_ready=self.answers.make_ready, takes=takes)

    def _heldout(self, job: Job, specs: Mapping[str, CacheSpec]) -> dict[str, Rows]:
        size = self.settings.batch_size
        encoded = {p.heldout.name: job.encode(p.heldout, size) for p in self.parts}
        meter = job.meter(job.prefilled(encoded, "answers, held out"))
        return measure_all(meter, specs, partial(job.progress, "caches, held out"))

    def _compared(self, share: Share, job: Job, tuned: Tuned) -> Pair:
        """The found spec or a preset that is nearer, by held-out samples."""
        known = job.known
        specs = {**known, CHOSEN: tuned.chosen.spec, SIXTEEN: DENSE}
        rows = self._heldout(job, specs)
        end = verdict(CHOSEN, specs, rows, known, limit=tuned.budget_bits)
        measured = sum(tried.number >= 0 for tried in tuned.tried)
        return Pair(share, end.kept, specs, rows, end, measured)


def make_joint(
    loading: Callable[[], Loaded],
    tasks: Sequence[Task],
    settings: JointSettings,
    out: str | Path,
    progress: Progress | None = None,
) -> Joint:
    """Split the tasks, count the weights of all recipes, and answer by the 16-bit model.

    Errors: ValueError for memory that no recipe leaves room in, prompts without answers, or a
    folder of another search. ImportError without Optuna.
    """
    need_optuna()
    check_tasks(tasks)
    parts = [split_task(task, settings.samples, settings.heldout) for task in tasks]
    silent = progress or (lambda stage, done, total: None)
    return Joint(loading, parts, settings, Path(out), silent)
