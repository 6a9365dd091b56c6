"""The end of a calibration or a search: the found spec against presets, on held-out samples.

A preset takes the place of the found spec if it needs no more true bits and is nearer to 16 bit.
Specs of which the samples prove nothing (`packed.unproved`) take part in no comparison.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from duotone.evaluate.forcing import forced_scores
from duotone.quant import CacheSpec
from duotone.tasks.metrics import Interval, paired_ratio

from .objective import KL_FLOOR, Measured
from .packed import packed_by, unproved
from .trials import outcome_of

Rows = Mapping[str, Measured]
# Of fewer pairs even a sign test settles nothing at 5 %, and a bootstrap would pretend to.
FEWEST = 6
# A preset of up to so many times the limit's bits is named where it is nearer to 16 bit.
NEAR = 1.25


@dataclass(frozen=True)
class Candidate:
    """One spec on the held-out samples. why: reason against its numbers, or ""."""

    label: str
    bits: float
    kl: float
    packed: float
    length: float
    why: str = ""

    @classmethod
    def of(cls, label: str, spec: CacheSpec, rows: Rows) -> Candidate:
        """Numbers of a spec measured on {task: samples}."""
        outcome = outcome_of(rows)
        numbers = (outcome.bits, 10**outcome.score, outcome.packed, packed_by(rows).length)
        return cls(label, *numbers, unproved(spec, rows))


@dataclass(frozen=True)
class Verdict:
    """Outcome of the comparison.

    kept: label of the spec to use. rival: the preset nearest to 16 bit at no more than `limit` true
    bits, None where no preset takes so few. ratio: KL of the found spec over the rival's, paired
    by samples. tasks: the samples' names. asked: the found spec is kept whatever was measured.
    others: all other presets. given_up: labels of presets whose measurement was ended, since they
    were far from 16 bit.
    """

    found: Candidate
    rival: Candidate | None
    ratio: Interval | None
    limit: float
    samples: int
    tasks: tuple[str, ...]
    asked: bool = False
    others: tuple[Candidate, ...] = ()
    given_up: tuple[str, ...] = ()

    @property
    def is_better(self) -> bool:
        """True unless a preset is nearer to 16 bit."""
        return self.ratio is None or self.ratio.value <= 1

    @property
    def is_settled(self) -> bool:
        """True where the interval of the ratio leaves no doubt who is nearer."""
        if self.ratio is None or self.samples < FEWEST:
            return False
        return not self.ratio.low <= 1 <= self.ratio.high

    @property
    def kept(self) -> str:
        """Label of the spec to use."""
        found_stays = self.is_better or self.asked
        return self.found.label if found_stays else self.rival.label

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe data."""
        return {
            "kept": self.kept,
            "better": self.found.label if self.is_better else self.rival.label,
            "settled": self.is_settled,
            "sentences": self.sentences(),
            "samples": self.samples,
            "tasks": list(self.tasks),
            "limit_bits": self.limit,
            "found": asdict(self.found),
            "rival": self.rival and asdict(self.rival),
            "kl_ratio": self.ratio and self.ratio.to_dict(),
            "presets": [asdict(one) for one in self.others],
            "given_up": list(self.given_up),
        }

    def sentences(self) -> list[str]:
        """Lines for people: who is better, by how much, what is kept, what is packed."""
        return [self._comparison(), *self._nearer_at_more(), self._packing()]

    def _comparison(self) -> str:
        found, rival = self.found, self.rival
        if rival is None and self.given_up:
            names = ", ".join(self.given_up)
            return (
                f"Presets of as many bits are tenfold further away ({names}): {found.label} stays."
            )
        if rival is None:
            return f"No preset takes {self.limit:.2f} true bits or less here: {found.label} stays."
        factor, low, high = self.ratio.value, self.ratio.low, self.ratio.high
        tasks = ", ".join(self.tasks)
        sure = "" if self.is_settled else ", which the samples do not settle"
        said = (
            f"{found.label}: KL {found.kl:.2g} at {found.bits:.2f} bits; {rival.label}, a preset: "
            f"KL {rival.kl:.2g} at {rival.bits:.2f} bits. Ratio {factor:.2g} ({low:.2g} to "
            f"{high:.2g}) on {self.samples} held-out samples ({tasks}){sure}."
        )
        if self.is_better:
            return f"{said} {found.label} is {'better' if factor < 1 else 'as near'} and is kept."
        if self.asked:
            return f"{said} {rival.label} is better; {found.label} is kept, as was asked."
        return f"{said} {rival.label} is better and takes its place."

    def _nearer_at_more(self) -> list[str]:
        """Name the nearest preset that takes a little more than the limit."""
        kept = min(self.found.kl, self.rival.kl if self.rival else self.found.kl)
        near = (self.limit, NEAR * self.limit)
        above = [one for one in self.others if near[0] < one.bits <= near[1] and not one.why]
        best = min(above, key=lambda one: one.kl, default=None)
        if best is None or best.kl >= kept:
            return []
        return [f"{best.label} is nearer at more bits: KL {best.kl:.2g} at {best.bits:.2f}."]

    def _packing(self) -> str:
        kept = self.found if self.kept == self.found.label else self.rival
        return (
            f"{kept.label} packs {100 * kept.packed:.0f} % of the tokens of these caches, "
            f"{kept.length:.0f} tokens long in the mean; others stay in 16 bit."
        )


def verdict(
    label: str,
    specs: Mapping[str, CacheSpec],
    rows: Mapping[str, Rows],
    presets: Collection[str],
    *,
    limit: float | None = None,
    asked: bool = False,
) -> Verdict:
    """Compare the found spec with presets, all measured on the same held-out samples.

    label: of the found spec. rows: {label: {task: measured}}. limit: true bits that a preset may
    take; None: the bits of the found spec.
    Errors: ValueError where the samples prove nothing of the found spec.
    """
    found = Candidate.of(label, specs[label], rows[label])
    if found.why:
        raise ValueError(
            f"a spec that nothing was measured of is no choice: {found.why}. Give longer samples "
            "or answers, or a spec with a shorter window"
        )
    limit = found.bits if limit is None else limit
    given_up = tuple(name for name in presets if name not in rows)
    others = [name for name in presets if name in rows and specs[name] != specs[label]]
    known = [Candidate.of(name, specs[name], rows[name]) for name in others]
    within = [one for one in known if one.bits <= limit and not one.why]
    rival = min(within, key=lambda one: one.kl, default=None)
    ratio = None if rival is None else kl_ratio(rows[label], rows[rival.label])
    samples = sum(len(one.rows) for one in rows[label].values())
    tasks = tuple(rows[label])
    return Verdict(found, rival, ratio, limit, samples, tasks, asked, tuple(known), given_up)


def kl_ratio(rows: Rows, others: Rows) -> Interval:
    """KL over another spec's KL on the same samples, geometric mean over tasks, with its interval.

    Both are above the floor of rounding, as in the search's score.
    """
    pairs = [[forced_scores(each[name].rows)["kl"] for each in (rows, others)] for name in rows]
    first, second = zip(*pairs, strict=True)
    return paired_ratio(first, second, floor=KL_FLOOR)
