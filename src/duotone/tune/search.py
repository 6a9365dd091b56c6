"""The search: an Optuna study of (mean log KL, log2 true bits), seeded and resumable.

Every trial draws from a sampler of its own, seeded by the search's seed and the number of finished
trials. So an interrupted study goes on exactly. An invalid point is a pruned trial. So is a point
that another spec clearly beats on the first batches.
"""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from duotone import CacheSpec

from .build import Ranking, spec_of
from .kept import reading
from .space import Choice, Point, Space
from .trials import Lost, Meter, Outcome, lost_to

SAMPLERS = ("nsga2", "tpe")
POPULATION = 12
# Crossing two good specs gives a bad one more often than not. So most children have one parent,
# with two or three choices changed.
CROSSOVER, MUTATION = 0.25, 0.07
JOURNAL = "trials.journal"


def need_optuna() -> Any:
    """Optuna. Errors: ImportError that names the remedy."""
    try:
        import optuna
    except ImportError as error:
        raise ImportError(
            "duotone tune needs Optuna, which is not installed: pip install 'duotone[tune]'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


@dataclass(frozen=True)
class Tried:
    """A finished trial with its spec."""

    number: int
    spec: CacheSpec
    outcome: Outcome


@contextmanager
def _experimental_features() -> Iterator[None]:
    """Silence Optuna's warnings of experimental features."""
    from optuna.exceptions import ExperimentalWarning

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        yield


def _distributions(space: Space) -> dict[str, Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    def of(dimension: Any) -> Any:
        if isinstance(dimension, Choice):
            return CategoricalDistribution(dimension.values)
        numbers = (dimension.low, dimension.high, dimension.step)
        whole = all(isinstance(number, int) for number in numbers)
        kind = IntDistribution if whole else FloatDistribution
        return kind(dimension.low, dimension.high, step=dimension.step)

    return {dimension.name: of(dimension) for dimension in space.dimensions}


def _sampler(name: str, seed: int, seeds: int) -> Any:
    from optuna.samplers import NSGAIISampler, TPESampler
    from optuna.samplers.nsgaii import PolynomialMutation

    with _experimental_features():
        if name == "nsga2":
            return NSGAIISampler(
                population_size=POPULATION,
                seed=seed,
                crossover_prob=CROSSOVER,
                mutation=PolynomialMutation(),
                mutation_prob=MUTATION,
            )
        return TPESampler(seed=seed, multivariate=True, n_startup_trials=seeds, constant_liar=False)


class Search:
    """A study on one space and one set of batches.

    storage: file of the study's journal; None keeps it in memory.
    ceiling: bits above which trials end.
    """

    def __init__(
        self,
        space: Space,
        meter: Meter,
        ranking: Ranking,
        ceiling: float,
        *,
        seeds: Sequence[Point] = (),
        seed: int = 0,
        sampler: str = "nsga2",
        storage: Path | None = None,
        predict: Callable[[CacheSpec], float] | None = None,
    ) -> None:
        self.optuna = need_optuna()
        self.space, self.meter, self.ranking, self.ceiling = space, meter, ranking, ceiling
        self.seeds, self.seed, self.sampler, self.predict = seeds, seed, sampler, predict
        self.distributions = _distributions(space)
        self.storage = storage
        with reading(storage, self.optuna.exceptions.OptunaError):
            self.study = self._study(storage)
            self._end_interrupted()
            self.tried = [self._restored(trial) for trial in self._in_state("COMPLETE")]

    def _study(self, storage: Path | None) -> Any:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        kept = None
        if storage is not None:
            with _experimental_features():
                kept = JournalStorage(JournalFileBackend(str(storage)))
        directions = ["minimize", "minimize"]
        return self.optuna.create_study(
            study_name="tune", storage=kept, directions=directions, load_if_exists=True
        )

    def _in_state(self, *states: str) -> list[Any]:
        wanted = tuple(self.optuna.trial.TrialState[state] for state in states)
        return self.study.get_trials(deepcopy=False, states=wanted)

    def _end_interrupted(self) -> None:
        """Restart trials that a process left unfinished, under a new number."""
        for trial in self._in_state("RUNNING"):
            self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)

    @staticmethod
    def _restored(trial: Any) -> Tried:
        outcome = Outcome.from_dict(trial.user_attrs["outcome"])
        return Tried(trial.number, CacheSpec.from_json(trial.user_attrs["spec"]), outcome)

    @property
    def done(self) -> int:
        """Finished trials, pruned ones included."""
        return len(self._in_state("COMPLETE", "PRUNED"))

    def consider(self, specs: Mapping[str, CacheSpec]) -> Iterator[str]:
        """Measure specs from outside of the space, which start the front; yields their labels."""
        for label, spec in specs.items():
            if not any(tried.spec == spec for tried in self.tried):
                with suppress(Lost):
                    self.tried.append(Tried(-1, spec, self._known(label, spec)))
            yield label

    def _known(self, label: str, spec: CacheSpec) -> Outcome:
        """The outcome of a labelled spec, from an earlier call if there was one."""
        kept = self.study.user_attrs.get(label)
        if kept is None:
            outcome = self._measured(spec)
            self.study.set_user_attr(label, json.loads(json.dumps(asdict(outcome))))
            return outcome
        with reading(self.storage):
            return Outcome.from_dict(kept)

    def run(
        self,
        trials: int | None = None,
        seconds: float | None = None,
        progress: Callable[[int, int | None], None] | None = None,
    ) -> None:
        """Go on until so many trials are finished in all, or so much time is over."""
        started, done = monotonic(), self.done
        while trials is None or done < trials:
            if seconds is not None and monotonic() - started > seconds:
                break
            self._one(done)
            done += 1
            if progress:
                progress(done, trials)

    def _one(self, done: int) -> None:
        """One trial: the next seed, or the sampler's proposal."""
        self.study.sampler = _sampler(self.sampler, self.seed * 1_000_003 + done, len(self.seeds))
        if done < len(self.seeds) and not self._in_state("WAITING"):
            self.study.enqueue_trial(self.seeds[done])
        with _experimental_features():
            trial = self.study.ask(self.distributions)
        self._join_generation()
        outcome = self._outcome(trial, race=done >= len(self.seeds))
        if outcome is None:
            self.study.tell(trial, state=self.optuna.trial.TrialState.PRUNED)
        else:
            self.study.tell(trial, (outcome.score, math.log2(outcome.bits)))

    def _join_generation(self) -> None:
        """Count the trial in the population.

        Optuna leaves enqueued trials out, and would draw a first generation at random, almost all
        useless.
        """
        if isinstance(self.study.sampler, self.optuna.samplers.BaseGASampler):
            (running,) = self._in_state("RUNNING")
            self.study.sampler.get_trial_generation(self.study, running)

    def _outcome(self, trial: Any, race: bool) -> Outcome | None:
        """Measure a trial's spec; None where it is invalid or lost, with the reason noted."""
        try:
            spec = spec_of(trial.params, self.space.layers, self.ranking)
            same = next((t for t in self.tried if t.spec == spec and t.number >= 0), None)
            if same is not None:
                raise Lost(f"the same as trial {same.number}")
            outcome = self._measured(spec, race)
        except (ValueError, Lost) as error:
            trial.set_user_attr("pruned", f"{type(error).__name__}: {error}"[:300])
            return None
        trial.set_user_attr("spec", spec.to_json())
        trial.set_user_attr("outcome", json.loads(json.dumps(asdict(outcome))))
        self.tried.append(Tried(trial.number, spec, outcome))
        return outcome

    def _measured(self, spec: CacheSpec, race: bool = True) -> Outcome:
        """The outcome of a spec. race: give up early; the first population runs to its end."""
        predicted = self.predict(spec) if self.predict else 0.0
        if predicted > self.ceiling:
            raise Lost(f"{predicted:.2f} predicted bits are above {self.ceiling:.2f}")
        others = [tried.outcome for tried in self.tried] if race else []
        return self.meter.outcome(spec, lost_to(others, self.ceiling))
