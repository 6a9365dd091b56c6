"""Put rows of a later run of `table.py` into the files of an earlier one.

    python -m benchmarks.quality.joined LATER results/quality

LATER is an --out of `table.py --rows`: each of its files has its rows put into the file of that
name. Differences are those of a row's own run. Files name all runs as `sources`.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from duotone.report.files import read_file

from .choose import PROVENANCE
from .tables import REFERENCE

# Fields that both files must have in common.
ALIKE = ("schema", "task", "headline", "later_question", "samples")


def joined(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """A file with the rows of both, those of the later one where both have them.

    Errors: ValueError for files of other tasks or samples, or whose scores in 16 bit differ by more
    than a quarter of their interval.
    """
    apart = [name for name in ALIKE if earlier[name] != later[name]]
    if apart:
        raise ValueError(f"files to join must agree in {ALIKE}; they differ in {apart}")
    plain = (file["schemes"][REFERENCE]["metrics"] for file in (earlier, later))
    old, new = (metrics[earlier["headline"]] for metrics in plain)
    if abs(old["value"] - new["value"]) > (old["high"] - old["low"]) / 4:
        raise ValueError(
            f"files to join must have one score in 16 bit; got {old['value']} and {new['value']}"
        )
    rows = {name: row for name, row in later["schemes"].items() if name != REFERENCE}
    first, last = ({name: file[name] for name in PROVENANCE} for file in (earlier, later))
    return {
        **earlier,
        **last,
        "sources": [*earlier.get("sources", [first]), last],
        "schemes": earlier["schemes"] | rows,
        "differences": earlier["differences"] | later["differences"],
    }


def main() -> None:
    """Join all files of a folder, and name them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("later", type=Path)
    parser.add_argument("earlier", type=Path)
    args = parser.parse_args()
    found = {}
    for path in sorted(args.later.glob("*.json")):
        place = args.earlier / path.name
        found[place] = joined(*(read_file(file)[0] for file in (place, path)))
    for path, data in found.items():
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
