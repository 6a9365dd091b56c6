"""Gather the files of `quality.py` into one file of lines per stress, for results/mquant/quality.

    python -m benchmarks.mquant.gather DIR results/mquant/quality && duotone report

DIR is the --out of `quality.py`: DIR/STRESS/RECIPE.json becomes a line of STRESS.jsonl. A recipe
that has one already gets the new one in its place; other recipes stay.
"""

import argparse
import json
from pathlib import Path

from duotone.report.files import read_file
from duotone.report.markdown import Result

from .quality_tables import place, stress_of


def gather(folder: Path, out: Path) -> list[Path]:
    """Write OUT/STRESS.jsonl of each folder of results; the paths.

    Errors: ValueError for a result whose stress is not its folder's, before anything is written.
    """
    found = {path: _results(path) for path in sorted(folder.iterdir()) if path.is_dir()}
    return [_merged(results, out / f"{path.name}.jsonl") for path, results in found.items()]


def _results(folder: Path) -> list[Result]:
    results = [row for path in sorted(folder.glob("*.json")) for row in read_file(path)]
    for result in results:
        stress = stress_of(result).replace(" ", "-")
        if stress != folder.name:
            raise ValueError(
                f"a folder has results of its own stress; got {result['recipe']} of {stress!r} in "
                f"{str(folder)!r}. Move it."
            )
    return results


def _merged(results: list[Result], path: Path) -> Path:
    kept = read_file(path) if path.exists() else []
    rows = {row["recipe"]: row for row in (*kept, *results)}
    lines = [json.dumps(rows[recipe]) for recipe in sorted(rows, key=place)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def main() -> None:
    """Parse the arguments and write the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    for path in gather(given.folder, given.out):
        print(path)


if __name__ == "__main__":
    main()
