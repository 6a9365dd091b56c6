"""The outcome of a search over pairs as files: the kept spec, all numbers, a page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from duotone.planning.card import AS_IT_IS
from duotone.report.joint import joint_page
from duotone.tasks.metrics import Interval
from duotone.tune.heldout import entry
from duotone.tune.trials import outcome_of
from duotone.tune.verdict import FEWEST, kl_ratio

from .models import WEIGHTS
from .run import SIXTEEN, Joint, Pair

SPEC, REPORT, PAGE = "spec.json", "report.json", "report.md"


def divergence(pair: Pair, label: str | None = None) -> float:
    """Held-out KL of a pair, or of its weights with another cache."""
    return 10 ** outcome_of(pair.rows[label or pair.label]).score


def kept_of(pairs: Sequence[Pair]) -> Pair:
    """The pair nearest to 16-bit weights with a 16-bit cache; of equal ones the fewest bytes."""
    return min(pairs, key=lambda pair: (divergence(pair), pair.share.weights_bytes))


def best_preset(pairs: Sequence[Pair]) -> tuple[Pair, str] | None:
    """(pair, label) of the nearest preset or 16-bit cache beside any weights."""
    found = [(divergence(p, one.label), p, one.label) for p in pairs if p.end for one in _within(p)]
    found += [(divergence(p), p, p.label) for p in pairs if p.end is None]
    _, pair, label = min(found, key=lambda one: one[0], default=(0.0, None, ""))
    return None if pair is None else (pair, label)


def _within(pair: Pair) -> list[Any]:
    limit = pair.end.limit
    return [one for one in pair.end.others if one.bits <= limit and not one.why]


def make_report(joint: Joint, pairs: Sequence[Pair]) -> dict[str, Any]:
    """All numbers of a search: a row per recipe, the kept pair, and the nearest pair of a preset.

    The kept pair is never farther from 16 bit than that preset's, on these samples.
    """
    kept = kept_of(pairs)
    settings, usual = joint.settings, joint.load.usual
    by_recipe = {pair.share.recipe: pair for pair in pairs}
    rows = [_row(joint, share, by_recipe.get(share.recipe)) for share in joint.shares]
    preset = best_preset(pairs)
    is_as_it_is = kept.share.recipe == AS_IT_IS
    return {
        "schema": "duotone.joint/1",
        **joint.header,
        "settings": joint.kept_settings,
        "memory": {
            "memory_bytes": settings.memory_bytes,
            "reserve_bytes": settings.reserve,
            "sequences": settings.sequences,
            "usual": vars(usual),
        },
        "rows": rows,
        "kept": {
            "weights": kept.share.recipe,
            "cache": kept.label,
            "folder": None if is_as_it_is else str(joint.out / kept.share.recipe / WEIGHTS),
            "spec": kept.spec.to_dict(),
            "kl": divergence(kept),
            "bytes": _bytes(joint, kept, kept.label),
        },
        "best_preset": preset
        and {
            "weights": preset[0].share.recipe,
            "cache": preset[1],
            "kl": divergence(*preset),
            "bytes": _bytes(joint, *preset),
        },
        "sentences": sentences(kept, pairs),
    }


def _bytes(joint: Joint, pair: Pair, label: str) -> int:
    """Weights and caches of all sequences."""
    return pair.share.weights_bytes + joint.load.caches_bytes(pair.specs[label])


def _row(joint: Joint, share: Any, pair: Pair | None) -> dict[str, Any]:
    if pair is None:
        return share.to_dict()
    return {
        **share.to_dict(),
        "cache": pair.label,
        "kl": divergence(pair),
        "weights_kl": divergence(pair, SIXTEEN),
        "bytes": _bytes(joint, pair, pair.label),
        "trials": pair.trials,
        "heldout": {label: entry(tasks) for label, tasks in pair.rows.items()},
        "verdict": pair.end and pair.end.to_dict(),
        "specs": {label: spec.to_dict() for label, spec in pair.specs.items()},
    }


def sentences(kept: Pair, pairs: Sequence[Pair]) -> list[str]:
    """Lines for people: the kept pair, and the nearest one of other weights."""
    said = [f"Kept: {_name(kept)}, KL {divergence(kept):.2g} from 16 bit on held-out samples."]
    said += [] if kept.end is None else kept.end.sentences()[-1:]
    others = [pair for pair in pairs if pair is not kept]
    if not others:
        return said
    second = kept_of(others)
    ratio = kl_ratio(kept.rows[kept.label], second.rows[second.label])
    samples = sum(len(one.rows) for one in kept.rows[kept.label].values())
    sure = "" if _is_settled(ratio, samples) else ", which the samples do not settle"
    said.append(
        f"Next: {_name(second)}, KL {divergence(second):.2g}. Ratio {ratio.value:.2g} "
        f"({ratio.low:.2g} to {ratio.high:.2g}) on {samples} held-out samples{sure}."
    )
    return said


def _is_settled(ratio: Interval, samples: int) -> bool:
    return samples >= FEWEST and not ratio.low <= 1 <= ratio.high


def _name(pair: Pair) -> str:
    weights = "weights as they are" if pair.share.recipe == AS_IT_IS else pair.share.recipe
    return f"{weights} with the cache {pair.label!r}"


def write_report(report: Mapping[str, Any], out: Path) -> list[Path]:
    """Write the kept spec, numbers and page into `out`, over earlier files of the same search."""
    files = {
        SPEC: json.dumps(report["kept"]["spec"], indent=1) + "\n",
        REPORT: json.dumps(report, indent=1) + "\n",
        PAGE: joint_page(report),
    }
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
    return [out / name for name in files]
