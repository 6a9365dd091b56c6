"""Tables of presets and calibrations against other rows of the zoo: schema duotone.zoo/1."""

from collections.abc import Iterator, Sequence
from statistics import geometric_mean
from typing import Any

from duotone.report.markdown import Result, markdown_table, source

LEAST = 1e-6  # ratio that counts in a geometric mean
CALIBQUANT = ("calibquant@1", "calibquant-paper@1")
MADE_UP = "calibrated, made up@1"
# (row, others, of which the nearest counts; share of their KL that it is meant to have)
BOUNDS = (
    ("duotone@1", ("lloyd, one gain@1",), 0.5),
    ("duotone@1", CALIBQUANT, 0.1),
    ("duotone@2", ("min/max@2",), 0.5),
    ("duotone@2", ("kivi@2",), 1.0),
    (MADE_UP, ("duotone@1",), 1.0),
    (MADE_UP, CALIBQUANT, 0.1),
    (MADE_UP, ("min/max@2",), 1.0),
    ("calibrated, equal bits@1", ("duotone@1",), 1.0),
    ("calibrated@1", ("min/max@2",), 1.0),
    ("calibrated, whole@1", ("min/max@2",), 1.0),
)
# Of `calibrated_table`: {row: head of its column}.
COLUMNS = {
    "calibquant-paper@1": "calibquant-paper@1",
    "duotone@1": "duotone@1",
    MADE_UP: "calibrated, no samples",
    "calibrated, equal bits@1": "calibrated, own samples",
    "min/max@2": "min/max@2",
    "kivi@2": "kivi@2",
}


def of_zoo(results: Sequence[Result]) -> list[Result]:
    """Results of models that constants were chosen on."""
    return [result for result in results if not is_unseen(result)]


def of_unseen(results: Sequence[Result]) -> list[Result]:
    """Results of models that nothing was chosen on."""
    return [result for result in results if is_unseen(result)]


def is_unseen(result: Result) -> bool:
    """True for a result of a model that nothing was chosen on."""
    from training.zoo.unseen import UNSEEN  # which loads models' libraries

    return result["model"] in UNSEEN


def bounds_table(results: Sequence[Result]) -> str:
    """Ratios of KL: in the geometric mean, at worst, and how many cases keep the share."""
    from benchmarks.quality.choose import Case  # which loads models' libraries
    from benchmarks.quality.zoo_files import newest

    found = newest(results)
    cases = [Case.of(result) for result in found]
    rows = [line for bound in BOUNDS if (line := _line(cases, *bound))]
    head = ["row", "over", "geometric mean", "worst", "of", "meant", "kept", "further away"]
    legend = (
        "KL of a row over that of another, or of the nearer of two. *Kept*: cases of models and "
        "stresses at no more than the share that is meant. *Further away*: cases beyond the "
        "paired interval."
    )
    return f"{markdown_table(head, rows)}\n\n{legend}\n\n*{source(*_files(found, results))}.*"


def calibrated_table(results: Sequence[Result]) -> str:
    """KL and true bits of calibrations beside presets, by model; without stress."""
    from benchmarks.quality.zoo_files import newest

    found = [result for result in newest(results) if result["stress"] == "none"]
    rows = [[result["model"], *_cells(result)] for result in found]
    legend = "KL in nats ± half the 95 % interval over sequences; true bits of visual tokens."
    table = markdown_table(["model", *COLUMNS.values()], rows)
    return f"{table}\n\n{legend}\n\n*{source(*_files(found, results))}.*"


def rows_table(results: Sequence[Result]) -> str:
    """KL and true bits of all rows by model, without stress; by bits."""
    from benchmarks.quality.zoo_files import newest

    found = [result for result in newest(results) if result["stress"] == "none"]
    cells = [_all_cells(result) for result in found]
    names = sorted({name for column in cells for name in column}, key=lambda n: _bits(n, found))
    rows = [[name, *(column.get(name, "") for column in cells)] for name in names]
    counts = sorted({result["sequences"] for result in found})
    legend = (
        f"KL in nats ± half the 95 % interval over {' or '.join(map(str, counts))} sequences; true "
        "bits of visual tokens. By true bits, the fewest first."
    )
    table = markdown_table(["row", *(result["model"] for result in found)], rows)
    return f"{table}\n\n{legend}\n\n*{source(*_files(found, results))}.*"


def _bits(name: str, results: Sequence[Result]) -> tuple[float, str]:
    """(true bits, name), to sort by."""
    rows = (row for result in results for row in result["rows"] if row["row"] == name)
    return min(row["visual_bits"] for row in rows if "visual_bits" in row), name


def _files(cases: Sequence[Result], files: Sequence[Result]) -> list[Result]:
    """Files that cases are of."""
    keys = [(case["model"], case["stress"], case.get("seed")) for case in cases]
    return [file for file in files if (file["model"], file["stress"], file.get("seed")) in keys]


def _cells(result: Result) -> list[str]:
    cells = _all_cells(result)
    return [cells.get(name, "") for name in COLUMNS]


def _all_cells(result: Result) -> dict[str, str]:
    """{row: KL and true bits} of rows with numbers."""
    return {
        row["row"]: f"{row['kl']:.2g} ± {row['kl_interval']:.1g} ({row['visual_bits']:.2f})"
        for row in result["rows"]
        if "visual_bits" in row
    }


def _line(cases: Sequence[Any], row: str, others: Sequence[str], share: float) -> list[str] | None:
    found = list(_ratios(cases, row, others))
    if not found:
        return None
    ratios = [max(ratio, LEAST) for ratio, _, _ in found]
    worst, case, _ = max(found, key=lambda each: each[0])
    kept = sum(ratio <= share for ratio in ratios)
    beyond = sum(is_beyond for *_, is_beyond in found)
    stress = "" if case.stress == "none" else f", {case.stress}"
    return [
        row,
        " or ".join(others),
        f"{geometric_mean(ratios):.2g}",
        f"{worst:.2g}",
        f"{case.model}{stress}",
        f"{share:g}",
        f"{kept} of {len(found)}",
        str(beyond),
    ]


def _ratios(
    cases: Sequence[Any], row: str, others: Sequence[str]
) -> Iterator[tuple[float, Any, bool]]:
    """(KL over the nearest other's, case, whether it is further away beyond the interval)."""
    for case in cases:
        known = [name for name in others if name in case.rows]
        if row in case.rows and known:
            other = min(known, key=lambda name: case.rows[name]["kl"])
            mean, half = case.difference(row, other)
            yield case.rows[row]["kl"] / case.rows[other]["kl"], case, mean > half


RENDERERS: dict[str, Any] = {
    "zoo-bounds": ("duotone.zoo/1", lambda results: bounds_table(of_zoo(results))),
    "zoo-calibrated": ("duotone.zoo/1", lambda results: calibrated_table(of_zoo(results))),
    "unseen-bounds": ("duotone.zoo/1", lambda results: bounds_table(of_unseen(results))),
    "unseen-rows": ("duotone.zoo/1", lambda results: rows_table(of_unseen(results))),
}
