"""Tables of `benchmarks/quality_table.py` (schema duotone.quality/1)."""

import re
from collections.abc import Sequence

from duotone.report.markdown import Result, markdown_table, source, with_interval

REFERENCE = "16-bit"


def provenance(results: Sequence[Result]) -> str:
    """One line: samples, model, device, versions, commits and date of the newest file."""
    samples = " / ".join(str(result["samples"]) for result in results)
    return f"*{samples} samples; ± half the 95 % bootstrap interval; {source(*results)}.*"


def visual_bits(scheme: Result) -> str:
    """True bits per number of visual tokens, or of the whole cache where there are none."""
    memory = scheme["memory"]
    bits = memory.get("visual_bits_per_element", memory["bits_per_element"])
    return f"{bits:.2f}"


def _change(value: float, reference: float) -> str:
    """Relative change to 16 bit in percent, in brackets; nothing where 16 bit scores 0."""
    return f" ({100 * (value / reference - 1):+.1f} %)" if reference else ""


def quality_cell(result: Result, label: str, metric: str) -> str:
    """Score, interval and change; bold where the paired interval of the change contains zero."""
    if label not in result["schemes"]:
        return ""
    interval = result["schemes"][label]["metrics"][metric]
    if label == REFERENCE:
        return with_interval(interval)
    reference = result["schemes"][REFERENCE]["metrics"][metric]["value"]
    cell = f"{with_interval(interval)}{_change(interval['value'], reference)}"
    difference = result["differences"][f"{label} - {REFERENCE}"][metric]
    return f"**{cell}**" if difference["low"] <= 0 <= difference["high"] else cell


def title(result: Result) -> str:
    """Task of a result, and whether its question came after the pictures."""
    later = " (question asked later)" if result["later_question"] else ""
    return f"{result['task']}{later}"


def _columns(results: Sequence[Result]) -> list[tuple[Result, str]]:
    """(result, metric) of every column: the headline, and what captions leave out beside CIDEr."""
    known = (result["schemes"][REFERENCE]["metrics"] for result in results)
    return [
        (result, name)
        for result, metrics in zip(results, known, strict=True)
        for name in dict.fromkeys([result["headline"], "object_recall"])
        if name in metrics
    ]


def _labels(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(label for result in results for label in result["schemes"]))


def quality_table(results: Sequence[Result]) -> str:
    """Schemes by tasks: the scores on held-out data, and their change from 16 bit."""
    return _table(results, _columns(results), _labels(results))


def _table(
    results: Sequence[Result], columns: Sequence[tuple[Result, str]], labels: Sequence[str]
) -> str:
    header = ["scheme @ bits", "true bits per visual number"]
    header += [f"{title(result)}, {metric.replace('_', ' ')}" for result, metric in columns]
    rows = []
    for label in labels:
        scheme = next(r["schemes"][label] for r in results if label in r["schemes"])
        cells = (quality_cell(result, label, metric) for result, metric in columns)
        rows.append([label, visual_bits(scheme), *cells])
    legend = "Bold: the paired 95 % interval of the difference from 16 bit contains zero."
    return "\n\n".join([markdown_table(header, rows), legend, provenance(results)])


# Rows of the README: our preset, the best of plain levels, and CalibQuant's two forms.
SUMMARY = (
    REFERENCE,
    "duotone @1",
    "lloyd, gain 1.3 / 1.4 @1",
    "calibquant, no tau @1",
    "calibquant @1",
    "duotone @2",
)


def quality_summary(results: Sequence[Result]) -> str:
    """Rows of SUMMARY by one metric per task, of questions that come after the pictures."""
    later = [result for result in results if result["later_question"]]
    columns = {result["task"]: (result, metric) for result, metric in _columns(later)}
    known = _labels(later)
    return _table(later, list(columns.values()), [name for name in SUMMARY if name in known])


def divergence_table(results: Sequence[Result]) -> str:
    """Schemes by tasks: KL(16-bit || scheme) of the next token along 16-bit answers, in nats."""
    header = ["scheme @ bits", *(f"{title(result)}, KL (nats)" for result in results)]
    rows = []
    for label in _labels(results):
        measured = [r["schemes"].get(label, {}).get("metrics", {}).get("kl") for r in results]
        if any(measured):
            rows.append([label, *(with_interval(kl, 4) if kl else "" for kl in measured)])
    return "\n\n".join([markdown_table(header, rows), provenance(results)])


def _grid_of(result: Result, prefix: str) -> str:
    """One 4 x 4 grid: tau1 down, tau2 across; the chosen pair is bold."""
    grid = result["tau_grid"]
    taus = sorted({int(t) for t in re.findall(r"tau (\d+),", " ".join(grid["metrics"]))})
    chosen = tuple(grid["chosen"][prefix])

    def cell(tau1: int, tau2: int) -> str:
        value = grid["metrics"][f"{prefix} tau {tau1},{tau2}"][result["headline"]]["value"]
        return f"**{value:.3f}**" if (tau1, tau2) == chosen else f"{value:.3f}"

    rows = [[f"tau1 = {a}", *(cell(a, b) for b in taus)] for a in taus]
    heading = f"{title(result)}, {prefix} bit: {result['headline']} on {grid['samples']} samples"
    return f"{heading}\n\n" + markdown_table(["", *(f"tau2 = {b}" for b in taus)], rows)


def tau_grids(results: Sequence[Result]) -> str:
    """All grids of tau on the calibration split."""
    searched = [result for result in results if result["tau_grid"]]
    grids = [_grid_of(r, prefix) for r in searched for prefix in r["tau_grid"]["chosen"]]
    if not grids:
        return "No grid was searched for these results."
    return "\n\n".join([*grids, provenance(results)])
