"""Table of W4A8 recipes under outlier channels: is the recommended one ever worse than another?"""

from collections.abc import Sequence

import numpy as np

from duotone.report.markdown import Result, markdown_table, source, with_interval
from duotone.tasks.metrics import Score, paired_difference

from .quality_tables import PLAIN, REFERENCE, megabytes, place, stress_of

RECOMMENDED = "quarot-vision8-per-token-w4a8"
STRESS_TASKS = ("captions", "documents")


def stress_table(results: Sequence[Result]) -> str:
    """A table per task: KL of each W4A8 recipe under each stress, bold where it beats RECOMMENDED.

    Differences are paired by sample; results without KL by sample have no part in it.
    """
    kept = compared(results)
    return "\n\n".join(
        _task_table(task, found)
        for task in STRESS_TASKS
        if (found := [r for r in kept if task in r["tasks"]])
    )


def compared(results: Sequence[Result]) -> list[Result]:
    """W4A8 results with a scale per channel and KL by sample."""
    return [r for r in results if r["recipe"].endswith("w4a8") and _is_paired(r)]


def _is_paired(result: Result) -> bool:
    return all("kl_by_sample" in task for task in result["tasks"].values())


def _task_table(task: str, results: Sequence[Result]) -> str:
    stresses = sorted({stress_of(r) for r in results}, key=lambda s: (s != PLAIN, s))
    found = {(r["recipe"], stress_of(r)): r for r in results}
    rows, better, cells = [], 0, 0
    for recipe in sorted({r["recipe"] for r in results}, key=place):
        own = [found.get((recipe, stress)) for stress in stresses]
        marks = [
            is_better(one, found.get((RECOMMENDED, stress_of(one))), task) for one in own if one
        ]
        better += sum(marks)
        cells += len(marks) if recipe != RECOMMENDED else 0
        size = next(megabytes(one, 0) for one in own if one)
        rows.append([recipe, size, *(_cell(one, found, task) for one in own)])
    samples = results[0]["tasks"][task]["samples"]
    calibration = results[0]["calibration"][0]["samples"]
    note = (
        f"KL (nats) to bf16 ± half the 95 % bootstrap interval; {samples} held-out and "
        f"{calibration} calibration samples; bold: below {RECOMMENDED} beyond the interval of "
        f"paired differences, {better} of {cells} cells; {source(*results)}"
    )
    head = ["recipe", "MB", *stresses]
    return f"**{task.capitalize()}**\n\n{markdown_table(head, rows)}\n\n*{note}.*"


def _cell(one: Result | None, found: dict, task: str) -> str:
    if one is None:
        return ""
    text = with_interval(one["tasks"][task]["metrics"]["kl"], 5)
    wins = is_better(one, found.get((RECOMMENDED, stress_of(one))), task)
    return f"**{text}**" if wins else text


def is_better(one: Result, other: Result | None, task: str) -> bool:
    """True if `one` diverges less than `other`, with all of the paired difference's interval."""
    if other is None or one["recipe"] in (other["recipe"], REFERENCE):
        return False
    mine, theirs = (
        Score(np.array(r["tasks"][task]["kl_by_sample"], dtype=np.float64)) for r in (one, other)
    )
    return paired_difference(mine, theirs).high < 0


# {name of the table: (schema of its result files, function that renders them)}
RENDERERS = {"mquant-stress": ("duotone.mquant.quality/1", stress_table)}
