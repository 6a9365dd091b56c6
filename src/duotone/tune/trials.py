"""One spec on all search batches: the two objectives, and the rule that ends a trial early."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from duotone import CacheSpec

from .bits import BitsOf
from .kept import number, numbers, numbers_by_name, text
from .objective import Measured, Ready, log_kl, measure
from .packed import packed_by, unproved

# A trial whose divergence is twice that of a spec of no more bits, on the batches so far, is lost.
LOST_BY = 0.3


@dataclass(frozen=True)
class Outcome:
    """Result of a whole measurement.

    score: mean over tasks of log10 KL, so that equal factors on two tasks weigh the same.
    parts: log10 KL of each batch, in order. packed: share of the tokens in codes. unproved: reason
    why the numbers prove nothing of the spec, or "".
    """

    score: float
    bits: float
    kl: dict[str, float]
    same_top_token: dict[str, float]
    parts: tuple[float, ...] = field(default=())
    packed: float = 0.0
    unproved: str = ""

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Outcome:
        """Inverse of `asdict`. Errors: ValueError for missing fields and what is no number."""
        score, bits = (number(data, name) for name in ("score", "bits"))
        shares = (numbers_by_name(data, name) for name in ("kl", "same_top_token"))
        packed, unproved = number(data, "packed"), text(data, "unproved")
        return cls(score, bits, *shares, numbers(data, "parts"), packed, unproved)


class Lost(Exception):  # noqa: N818 - no error: the end of a trial that cannot win
    """Error of a trial that was given up; the message names the reason."""


Rival = Callable[[float, Sequence[float]], str | None]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)


def in_turn(batches: Mapping[str, Sequence[Ready]]) -> list[tuple[str, Ready]]:
    """(task, batch): the first of every task, shortest prompts first, then the second, ..."""
    by_length = sorted(batches, key=lambda name: batches[name][0].mask.numel())
    most = max(map(len, batches.values()))
    rounds = ([(n, batches[n][i]) for n in by_length if i < len(batches[n])] for i in range(most))
    return [pair for one_round in rounds for pair in one_round]


@dataclass(frozen=True)
class Meter:
    """Measures specs on the same batches."""

    model: Any
    batches: Mapping[str, Sequence[Ready]]
    of: BitsOf

    def measured(
        self, spec: CacheSpec, rival: Rival | None = None
    ) -> tuple[dict[str, Measured], list[float]]:
        """({task: all its samples}, log10 KL of each batch).

        rival: called after each batch with the bits and parts so far; a returned reason ends the
        trial.
        Errors: ValueError where the spec does not fit; Lost.
        """
        tasks: dict[str, Measured] = {}
        parts: list[float] = []
        for name, batch in in_turn(self.batches):
            one = measure(self.model, batch, spec, of=self.of)
            tasks[name] = tasks[name] + one if name in tasks else one
            parts.append(log_kl(one.kl))
            reason = rival(true_bits(tasks.values()), parts) if rival else None
            if reason:
                raise Lost(reason)
        return tasks, parts

    def outcome(self, spec: CacheSpec, rival: Rival | None = None) -> Outcome:
        """The objectives of one spec."""
        tasks, parts = self.measured(spec, rival)
        return replace(outcome_of(tasks, parts), unproved=unproved(spec, tasks))


def true_bits(parts: Any) -> float:
    """True bits per number over several measurements: all bytes over all numbers."""
    first, *others = (part.held for part in parts)
    return sum(others, first).bits


def outcome_of(tasks: Mapping[str, Measured], parts: Sequence[float] = ()) -> Outcome:
    """The objectives of {task: measurement}."""
    kl = {name: one.kl for name, one in tasks.items()}
    same = {name: one.same_top_token for name, one in tasks.items()}
    score = mean([log_kl(value) for value in kl.values()])
    packed = packed_by(tasks).share
    return Outcome(score, true_bits(tasks.values()), kl, same, tuple(parts), packed)


def lost_to(others: Sequence[Outcome], ceiling: float) -> Rival:
    """A rule that ends trials above `ceiling` bits or clearly beaten by another outcome."""

    def reason(bits: float, parts: Sequence[float]) -> str | None:
        if bits > ceiling:
            return f"{bits:.2f} bits are above {ceiling:.2f}"
        so_far = mean(parts)
        for other in others:
            beaten = other.bits <= bits and mean(other.parts[: len(parts)]) < so_far - LOST_BY
            if beaten and len(other.parts) > len(parts):
                return f"{other.bits:.2f} bits do better"
        return None

    return reason
