"""Cells in which another recipe beats a W4A8 one, for each: is one never worse?

    python -m benchmarks.mquant.beaten results/mquant/quality

A cell is a task and a stress. A recipe beats another where all of the interval of the paired
difference of KL is below zero (`stress_tables.is_better`). Reading takes seconds, comparing all
pairs of recipes up to a minute.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from duotone.report.markdown import Result
from duotone.report.tables import read_results

from .quality_tables import place, stress_of
from .stress_tables import STRESS_TASKS, compared, is_better

Cell = tuple[str, str]


def beaten_by(results: Sequence[Result]) -> dict[str, dict[Cell, list[str]]]:
    """{recipe: {(task, stress): recipes that beat it there}}, with cells of all recipes alone."""
    kept = compared(results)
    recipes = sorted({one["recipe"] for one in kept}, key=place)
    found = {(one["recipe"], stress_of(one)): one for one in kept}
    stresses = sorted({stress for _, stress in found})
    cells = [(task, stress) for task in STRESS_TASKS for stress in stresses]
    return {
        recipe: {cell: better for cell in cells if (better := _better(recipe, cell, found))}
        for recipe in recipes
    }


def _better(recipe: str, cell: Cell, found: dict[tuple[str, str], Result]) -> list[str]:
    task, stress = cell
    own = found.get((recipe, stress))
    rivals = [one for (_, where), one in found.items() if where == stress and task in one["tasks"]]
    return [one["recipe"] for one in rivals if is_better(one, own, task)]


def lines(beaten: dict[str, dict[Cell, list[str]]]) -> Iterable[str]:
    """A line per recipe, the least beaten first; cells by name where they are few."""
    for recipe, cells in sorted(beaten.items(), key=lambda item: len(item[1])):
        named = "; ".join(
            f"{task}, {stress}: {', '.join(by)}" for (task, stress), by in cells.items()
        )
        yield f"{recipe}: beaten in {len(cells)} cells" + (f" ({named})" if len(cells) < 4 else "")


def main() -> None:
    """Parse the arguments and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    for line in lines(beaten_by(read_results(parser.parse_args().folder))):
        print(line)


if __name__ == "__main__":
    main()
