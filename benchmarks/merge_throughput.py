"""Results of `duotone bench throughput` into one file per model, a line per result.

    python benchmarks/merge_throughput.py FOLDER --out results/throughput

FOLDER is what `--out` of the benchmark was; its files stay. Lines are in the order of the files'
names. A configuration that MODEL.jsonl has is refused; --replace puts the new result in its place.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from duotone.bench.throughput import Configuration
from duotone.report.files import read_file

Result = Mapping[str, Any]
Lines = dict[Configuration, Result]


def add(lines: Lines, result: Result, where: Path) -> None:
    """Add a result to others of its model. Errors: ValueError for a configuration they have."""
    at = Configuration.of(result)
    if at in lines:
        raise ValueError(f"a configuration has one result; got a second one of {at} in {where}")
    lines[at] = result


def read_new(folder: Path) -> dict[str, Lines]:
    """New results below a folder, by model. Errors: ValueError for none and for other files."""
    found: dict[str, Lines] = {}
    for path in sorted(folder.rglob("*.json")):
        (result,) = read_file(path)
        Configuration.of(result)
        add(found.setdefault(result["model"]["name"], {}), result, path)
    if not found:
        raise ValueError(f"FOLDER must hold results of duotone bench throughput; got {folder}")
    return found


def read_old(path: Path) -> Lines:
    """Results of a model that were merged before."""
    lines: Lines = {}
    for result in read_file(path) if path.exists() else ():
        add(lines, result, path)
    return lines


def merge(folder: Path, out: Path, replace: bool = False) -> dict[Path, int]:
    """Write OUT/MODEL.jsonl for every model with results below `folder`; returns their lines.

    Errors: ValueError, before anything is written, for what is no result of throughput, and for
    a configuration twice: in `folder`, or in both unless `replace`.
    """
    texts = {}
    for model, new in read_new(folder).items():
        path = out / f"{model}.jsonl"
        old = read_old(path)
        if not replace and (twice := [at for at in new if at in old]):
            raise ValueError(
                f"{path} must not have what is merged into it; got {len(twice)} of its "
                f"configurations, the first {twice[0]}. Give --replace to take the new results."
            )
        results = sorted((old | new).items(), key=lambda item: item[0].path(out, model))
        texts[path] = [json.dumps(result, separators=(",", ":")) + "\n" for _, result in results]
    out.mkdir(parents=True, exist_ok=True)
    for path, lines in texts.items():
        path.write_text("".join(lines), encoding="utf-8")
    return {path: len(lines) for path, lines in texts.items()}


def main() -> None:
    """Merge the results of a folder."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="what --out of the benchmark was")
    parser.add_argument("--out", type=Path, default=Path("results/throughput"))
    parser.add_argument("--replace", action="store_true", help="take new results of old ones")
    given = parser.parse_args()
    for path, lines in merge(given.folder, given.out, given.replace).items():
        print(f"{path}: {lines} results")


if __name__ == "__main__":
    main()
