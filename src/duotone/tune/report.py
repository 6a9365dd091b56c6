"""The outcome of a search as files: the spec, all numbers, a page and a plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from duotone import CacheSpec
from duotone.report.tune import tune_page

from .front import best_within, pareto_front, thinned
from .heldout import Rows, entry, measure_all, task_scores
from .run import Job, Tuned
from .seeds import PUBLISHED
from .verdict import Verdict, verdict

SPEC, FOUND = "spec.json", "found.json"
REPORT, PAGE, PLOT = "report.json", "report.md", "front.png"
# Points of the front that are measured on held-out samples.
FRONT_POINTS = 16
SCORED_PUBLISHED = 2
CHOSEN = "chosen"


def _front_specs(tuned: Tuned, bits: list[float]) -> dict[str, CacheSpec]:
    """{label: spec}: the chosen spec, the front thinned, and its best within each of `bits`."""
    points = [(tried.outcome.bits, tried.outcome.score) for tried in tuned.tried]
    front = pareto_front(points)
    kept = set(thinned(front, points, FRONT_POINTS))
    kept |= {best for b in bits if (best := best_within(points, b)) is not None}
    ordered = sorted(kept, key=lambda i: points[i])
    found = {f"front {n}": tuned.tried[i].spec for n, i in enumerate(ordered, start=1)}
    return {CHOSEN: tuned.chosen.spec, **found}


def heldout_numbers(
    job: Job, tuned: Tuned, keep_found: bool = False
) -> tuple[dict[str, Any], dict[str, CacheSpec], Verdict]:
    """({label: numbers}, {label: spec}, verdict) of the front and of the known schemes, held out.

    keep_found: the verdict keeps the chosen spec whatever was measured.
    """
    size = job.settings.batch_size
    encoded = {part.heldout.name: job.encode(part.heldout, size) for part in job.parts}
    meter = job.meter(job.prefilled(encoded, "16-bit answers, held out"))
    known = job.known

    def measured(specs: Mapping[str, CacheSpec], stage: str) -> dict[str, Rows]:
        return measure_all(meter, specs, lambda done, total: job.progress(stage, done, total))

    rows = measured(known, "published, held out")
    bits = [entry(tasks)["bits"] for tasks in rows.values()]
    specs = _front_specs(tuned, bits)
    rows |= measured(specs, "front, held out")
    numbers = {label: entry(tasks, rows[CHOSEN]) for label, tasks in rows.items()}
    specs = known | specs
    found = verdict(CHOSEN, specs, rows, known, limit=tuned.budget_bits, asked=keep_found)
    return numbers, specs, found


def comparisons(numbers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each published scheme with the front's best point of no more bits, by held-out numbers."""
    ours = [label for label in numbers if label == CHOSEN or label.startswith("front ")]
    points = [(numbers[label]["bits"], numbers[label]["kl"]) for label in ours]
    rows = []
    for label in (name for name in PUBLISHED if name in numbers):
        bits, kl = numbers[label]["bits"], numbers[label]["kl"]
        best = best_within(points, bits)
        row: dict[str, Any] = {"label": label, "bits": bits, "kl": kl}
        if best is not None:
            beaten = points[best][1] < kl
            row |= {"by": ours[best], "its_bits": points[best][0], "its_kl": points[best][1]}
            row |= {"beaten": beaten}
        rows.append(row)
    return rows


def _scored(numbers: Mapping[str, Any], budget: float) -> list[str]:
    """Labels whose answers are generated: the chosen spec, ours, and the best published near it."""
    near = [label for label in PUBLISHED if label in numbers]
    near = [label for label in near if numbers[label]["bits"] <= 2 * budget]
    near.sort(key=lambda label: numbers[label]["kl"])
    return [CHOSEN, *(["duotone @1"] if "duotone @1" in numbers else []), *near[:SCORED_PUBLISHED]]


def make_report(
    job: Job, tuned: Tuned, *, scores: bool = True, keep_found: bool = False
) -> dict[str, Any]:
    """All numbers of a search, and which spec is kept: the chosen one, or a preset that is better.

    scores: also generate the held-out answers of a few specs. keep_found: keep the chosen spec.
    """
    numbers, specs, end = heldout_numbers(job, tuned, keep_found)
    labels = _scored(numbers, tuned.budget_bits) if scores else []
    labels += [end.kept] if scores and end.kept not in labels else []
    scored = task_scores(
        job.loaded,
        job.parts,
        {label: specs[label] for label in labels},
        later={p.heldout.name: job.later_question for p in job.parts},
        batch_size=job.settings.batch_size,
        progress=lambda done, total: job.progress("answers, held out", done, total),
    ) if scores else {}  # fmt: skip
    return {
        "schema": "duotone.tune/1",
        **job.header,
        "settings": job.all_settings(),
        "later_question": job.later_question,
        "budget": {"bits": tuned.budget_bits, "of": tuned.of},
        "trials": {
            "measured": sum(tried.number >= 0 for tried in tuned.tried),
            "pruned": tuned.pruned,
            "search_seconds": round(tuned.seconds, 1),
        },
        "sensitivity": {
            "key": list(tuned.sensitivity.key),
            "value": list(tuned.sensitivity.value),
            "baseline": tuned.sensitivity.baseline,
        },
        "search": [
            {"bits": tried.outcome.bits, "kl": 10**tried.outcome.score} for tried in tuned.tried
        ],
        "heldout": numbers,
        "verdict": end.to_dict(),
        "published": [label for label in PUBLISHED if label in numbers],
        "specs": {label: spec.to_dict() for label, spec in specs.items()},
        "comparisons": comparisons(numbers),
        "scores": scored,
        "seconds": round(job.elapsed, 1),
    }


def write_report(report: Mapping[str, Any], out: Path, *, plot: bool = True) -> list[Path]:
    """Write spec, numbers, page and plot into `out`, over earlier files of the same search.

    SPEC is the kept spec; where that is a preset, FOUND is the chosen one.
    """
    import json

    kept = CacheSpec.from_dict(report["specs"][report["verdict"]["kept"]])
    chosen = CacheSpec.from_dict(report["specs"][CHOSEN])
    files = {
        SPEC: json.dumps(kept.to_dict(), indent=1) + "\n",
        **({FOUND: json.dumps(chosen.to_dict(), indent=1) + "\n"} if kept != chosen else {}),
        REPORT: json.dumps(report, indent=1) + "\n",
        PAGE: tune_page(report, PLOT if plot else None),
    }
    (out / FOUND).unlink(missing_ok=True)
    for name, text in files.items():
        (out / name).write_text(text, encoding="utf-8")
    if plot:
        from duotone.report.plots import front

        front(report).savefig(out / PLOT)
    return [out / name for name in (*files, *([PLOT] if plot else []))]
