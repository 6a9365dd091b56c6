"""Choose the presets by who beats them, and score each model by a choice that did not see it.

    PYTHONPATH=src:. python -m benchmarks.quality.choose FOLDER --out CHOICE.json

FOLDER has files of `zoo.py --candidates`, one per model and stress. A candidate's loss in a case is
its KL over that of the best plain code of the same nominal width. The choice is the candidate that
fewest other rows beat beyond the interval, and of equals the one of the least loss in the geometric
mean over cases: left out, the least worst loss chooses candidates that lose more by both. A model
is left out with all its stresses: the candidate reported for it is the one chosen on the others.
`duotone` has no say, being a candidate already, nor have our own calibrations. A candidate without
numbers in some case is no choice: it is printed and recorded as dropped, with the case and why.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch

from benchmarks.quality.bounds import within_bounds
from benchmarks.quality.zoo import WIDTHS, candidates, ratio
from benchmarks.quality.zoo_files import cases_of
from duotone.report.files import read_file
from duotone.report.provenance import write_new_json

PLAIN = ("min/max", "lloyd, one gain", "kivi", "calibquant", "calibquant-paper")
LEAST_LOSS = 1e-6
PREFIX = "parts, "  # of the names of candidates
CALIBRATED = "calibrated"  # begins the names of our own specs that need data
# Fields of a file that say where its numbers are from.
PROVENANCE = ("created", "commit", "versions", "device")


@dataclass(frozen=True)
class Case:
    """One model under one stress.

    tokens: of answers, by sequence. rows: of the file, by name. failed: reasons of rows without
    numbers.
    """

    model: str
    stress: str
    tokens: list[int]
    rows: Mapping[str, Mapping[str, Any]]
    failed: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> "Case":
        """Return the case of a file. Errors: ValueError for a file without sums by sequence."""
        plain, *rows = data["rows"]
        if "tokens" not in plain:
            case = f"{data['model']}, {data['stress']}, of {data['created']}"
            raise ValueError(f"a file must have sums by sequence, as zoo.py writes; got {case}")
        by_name = {row["row"]: row for row in rows if "failed" not in row}
        failed = {row["row"]: row["failed"] for row in rows if "failed" in row}
        return cls(data["model"], data["stress"], plain["tokens"], by_name, failed)

    def loss(self, row: str, bits: int) -> float:
        """KL of a row over the least KL of a plain code of `bits`."""
        return self.rows[row]["kl"] / self.rows[self.best_plain(bits)]["kl"]

    def best_plain(self, bits: int) -> str:
        """Name of the plain code that loses least. Errors: ValueError where none has numbers."""
        names = [f"{name}@{bits}" for name in PLAIN if f"{name}@{bits}" in self.rows]
        if not names:
            case = f"{self.model}, {self.stress}"
            raise ValueError(f"a case needs a plain code of {bits} bits; got none for {case}")
        return min(names, key=lambda name: self.rows[name]["kl"])

    def difference(self, row: str, other: str) -> tuple[float, float]:
        """KL of a row less that of another, and half of its interval, over pairs of sequences."""
        ours, theirs = (torch.tensor(self.rows[name]["kl_sums"]) for name in (row, other))
        return ratio(ours.double() - theirs.double(), torch.tensor(self.tokens))


def worst(cases: Sequence[Case], row: str, bits: int) -> float:
    """Largest loss of a row over cases."""
    return max(case.loss(row, bits) for case in cases)


def typical(cases: Sequence[Case], row: str, bits: int) -> float:
    """Geometric mean of a row's losses over cases, with rounding's zeros and less at LEAST_LOSS."""
    return geometric_mean([max(case.loss(row, bits), LEAST_LOSS) for case in cases])


def beaten_by(case: Case, row: str, bits: int) -> list[str]:
    """Rows that lose less than `row`, beyond the interval: no candidates, none of `calibrate`."""
    names = [name for name in _others(case, bits) if not name.startswith(CALIBRATED)]
    differences = {name: case.difference(row, name) for name in names}
    return [name for name, (mean, half) in differences.items() if mean > half]


def choose(cases: Sequence[Case], rows: Sequence[str], bits: int) -> str:
    """Name of the row that fewest others beat, over all cases; of equals, the least `typical`."""
    if not cases or not rows:
        raise ValueError(f"a choice needs cases and candidates; got {len(cases)}, {len(rows)}")
    beaten = {row: sum(len(beaten_by(case, row, bits)) for case in cases) for row in rows}
    return min(rows, key=lambda row: (beaten[row], typical(cases, row, bits)))


def held_out(cases: Sequence[Case], rows: Sequence[str], bits: int) -> dict[str, str]:
    """{model: the candidate that all other models choose}."""
    models = list(dict.fromkeys(case.model for case in cases))
    others = {model: [case for case in cases if case.model != model] for model in models}
    return {model: choose(others[model], rows, bits) for model in models}


def dropped(cases: Sequence[Case], rows: Sequence[str], bits: int) -> list[dict[str, str]]:
    """Rows of `bits` without numbers in a case: {row, model, stress, why}.

    rows: candidates, which every case should have. Of all others: those that failed.
    """
    return [
        {
            "row": name,
            "model": case.model,
            "stress": case.stress,
            "why": case.failed.get(name, "not in the file"),
        }
        for case in cases
        for name in dict.fromkeys([*rows, *(x for x in case.failed if x.endswith(_ends(bits)))])
        if name not in case.rows
    ]


def report(cases: Sequence[Case], rows: Sequence[str], bits: int) -> dict[str, Any]:
    """The choice at one width, and each case scored by the choice of the other models.

    rows: candidates; those without numbers in a case are dropped.
    """
    missing = dropped(cases, rows, bits)
    rows = [name for name in rows if name not in {row["row"] for row in missing}]
    chosen = held_out(cases, rows, bits)
    return {
        "bits": bits,
        "dropped": missing,
        "preset": choose(cases, rows, bits),
        "worst": {row: worst(cases, row, bits) for row in rows},
        "typical": {row: typical(cases, row, bits) for row in rows},
        "left_out": chosen,
        "cases": [_scored(case, chosen[case.model], bits) for case in cases],
    }


def _scored(case: Case, chosen: str, bits: int) -> dict[str, Any]:
    """Rows of a case: the held-out choice, then all that are no candidates; by rising KL."""
    names = _others(case, bits)
    least = min([chosen, *names], key=lambda name: case.rows[name]["kl"])
    scored = [
        {
            "row": "held-out choice" if name == chosen else name,
            **{key: case.rows[name][key] for key in ("kl", "kl_interval", "visual_bits")},
            "as_the_least": _holds_zero(case, name, least),
        }
        for name in [chosen, *names]
    ]
    return {
        "model": case.model,
        "stress": case.stress,
        "sequences": len(case.tokens),
        "rows": sorted(scored, key=lambda row: row["kl"]),
        "best_plain": case.best_plain(bits),
        "beaten_by": beaten_by(case, chosen, bits),
    }


def _others(case: Case, bits: int) -> list[str]:
    """Names of a case's rows of one width that are no candidates."""
    ours = f"duotone@{bits}"
    names = (name for name in case.rows if name.endswith(_ends(bits)) and PREFIX not in name)
    return [name for name in names if name != ours]


def _ends(bits: int) -> tuple[str, ...]:
    """Ends of the names of rows of one width."""
    return f"@{bits}", f"K{bits} V{bits}"


def _holds_zero(case: Case, row: str, least: str) -> bool:
    mean, half = case.difference(row, least)
    return mean <= half


def read_cases(folder: Path) -> tuple[list[Case], dict[str, Any]]:
    """Cases of all files of a folder and of its folder `calibrated`, and their provenance.

    Errors: ValueError.

    The provenance is the newest file's; its "sources" are those of all files, the oldest first.
    """
    paths = [*sorted(folder.glob("*.json")), *sorted(folder.glob("calibrated/*.json"))]
    found = [data for path in paths for data in read_file(path)]
    found = [data for data in found if data.get("schema") == "duotone.zoo/1"]
    if not found:
        raise ValueError(f"a folder must have files of zoo.py; got none in {str(folder)!r}")
    by_age = sorted(found, key=lambda data: data["created"])
    sources = [{name: data[name] for name in ("model", "stress", *PROVENANCE)} for data in by_age]
    newest = {name: by_age[-1][name] for name in PROVENANCE}
    return [Case.of(data) for data in cases_of(found)], newest | {"sources": sources}


def main() -> None:
    """Choose at all widths, print losses (typical, worst), and write the scores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="files of zoo.py --candidates")
    parser.add_argument("--out", type=Path, required=True, help="a new file")
    args = parser.parse_args()
    cases, header = read_cases(args.folder)
    widths = []
    for bits in WIDTHS:
        known = {name: spec for name, spec in candidates(bits).items() if within_bounds(spec, bits)}
        if not any(name in case.rows for name in known for case in cases):
            print(f"{bits} bits: no candidates in these files")
            continue
        widths.append(report(cases, list(known), bits))
        print(f"{bits} bits: {widths[-1]['preset']}; left out: {widths[-1]['left_out']}")
        for row in widths[-1]["dropped"]:
            print("   dropped  {row}, by {model}, {stress}: {why}".format(**row))
        for name, loss in sorted(widths[-1]["typical"].items(), key=lambda item: item[1]):
            print(f"  {loss:8.3f}  {widths[-1]['worst'][name]:8.3f}  {name}")
    write_new_json(args.out, {"schema": "duotone.zoo-choice/1", **header, "widths": widths})


if __name__ == "__main__":
    main()
