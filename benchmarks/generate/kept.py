"""Copy files of `duotone bench generate --budget` without rows of some schemes.

    python -m benchmarks.generate.kept results/budget OUT duotone duotone-mixed

A run into OUT then measures these rows alone, for instance where a scheme has become another one.
Files of other devices are left out: their rows cannot stand beside those of this one.
"""

import argparse
import json
from pathlib import Path

from duotone.defaults import name_of
from duotone.report.provenance import stamp
from duotone.report.tables import RENDERERS

SCHEMA, _ = RENDERERS["generate-budget"]


def copy_kept(folder: Path, out: Path, schemes: list[str], device: str) -> list[Path]:
    """Write the files of `device` with the other rows; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA or data["device"] != device:
            continue
        data["rows"] = [row for row in data["rows"] if name_of(row["row"]) not in schemes]
        written.append(out / path.name)
        written[-1].write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    return written


def main() -> None:
    """Read the arguments and say what was written."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("schemes", nargs="+")
    parser.add_argument("--device", default="cuda")
    asked = parser.parse_args()
    device = stamp(asked.device)["device"]
    written = copy_kept(asked.folder, asked.out, asked.schemes, device)
    print(f"{len(written)} files of {device} in {asked.out}")


if __name__ == "__main__":
    main()
