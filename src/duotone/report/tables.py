"""Result files to Markdown tables; numbers in a README come from here and are never typed.

Imports no room and needs neither a GPU nor a model. A table of a README stands between
`<!-- duotone:NAME -->` and `<!-- /duotone:NAME -->` and is replaced as a whole.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from duotone import json_text
from duotone.report.kernels import innerq_table, kernel_summary, kernel_table, packing_table
from duotone.report.markdown import (
    EIGHT_BITS,
    Result,
    has_8_bit_window,
    markdown_table,
    source,
    with_16_bit_numbers,
    with_interval,
)
from duotone.report.mquant import (
    decode_table,
    model_table,
    paper_table,
    prefill_table,
    static_table,
    step_table,
)
from duotone.report.mquant_quality import memory_table, modality_table, split_table
from duotone.report.mquant_quality import quality_table as mquant_quality_table
from duotone.report.throughput import prediction_table, throughput_table
from duotone.report.transform import (
    alternatives_table,
    choices_table,
    cost_table,
    reach_table,
    robustness_table,
    transform_text_table,
    widths_table,
)
from duotone.report.tune import tune_comparisons, tune_scores, tune_sensitivity, tune_table

REFERENCE = "16-bit"
_MARKED = re.compile(
    r"(?P<open><!-- duotone:(?P<name>[\w-]+) -->\n).*?(?P<close><!-- /duotone:(?P=name) -->)", re.S
)


def _provenance(results: Sequence[Result]) -> str:
    """One line: samples, model, device, versions, commits and date of the newest file."""
    samples = " / ".join(str(result["samples"]) for result in results)
    return f"*{samples} samples; ± half the 95 % bootstrap interval; {source(*results)}.*"


def _visual_bits(scheme: Result) -> str:
    memory = scheme["memory"]
    bits = memory.get("visual_bits_per_element", memory["bits_per_element"])
    return f"{bits:.2f}"


def _change(value: float, reference: float) -> str:
    """Relative change to 16 bit in percent, in brackets; nothing where 16 bit scores 0."""
    return f" ({100 * (value / reference - 1):+.1f} %)" if reference else ""


def _quality_cell(result: Result, label: str, metric: str) -> str:
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


def _title(result: Result) -> str:
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


def quality_table(results: Sequence[Result], labels: Sequence[str] | None = None) -> str:
    """Schemes by tasks: the scores on held-out data, and their change from 16 bit.

    labels: the rows, those that the results have; all without it.
    """
    header = ["scheme @ bits", "true bits per visual number"]
    columns = _columns(results)
    header += [f"{_title(result)}, {metric.replace('_', ' ')}" for result, metric in columns]
    rows = []
    known = _labels(results)
    for label in known if labels is None else [label for label in labels if label in known]:
        scheme = next(r["schemes"][label] for r in results if label in r["schemes"])
        cells = (_quality_cell(result, label, metric) for result, metric in columns)
        rows.append([label, _visual_bits(scheme), *cells])
    legend = "Bold: the paired 95 % interval of the difference from 16 bit contains zero."
    return "\n\n".join([markdown_table(header, rows), legend, _provenance(results)])


# What a reader wants first: the preset at all widths, and CalibQuant at 1 bit.
SUMMARY = (
    "duotone @1",
    "calibquant @1",
    "calibquant, no tau @1",
    "calibquant-paper @1",
    "duotone @2",
    "duotone @4",
    "duotone @8",
)


def quality_summary(results: Sequence[Result]) -> str:
    """`quality_table` with the rows of SUMMARY, in that order."""
    return quality_table(results, [REFERENCE, *SUMMARY])


def divergence_table(results: Sequence[Result]) -> str:
    """Schemes by tasks: KL(16-bit || scheme) of the next token along 16-bit answers, in nats."""
    header = ["scheme @ bits", *(f"{_title(result)}, KL (nats)" for result in results)]
    rows = []
    for label in _labels(results):
        measured = [r["schemes"].get(label, {}).get("metrics", {}).get("kl") for r in results]
        if any(measured):
            rows.append([label, *(with_interval(kl, 4) if kl else "" for kl in measured)])
    return "\n\n".join([markdown_table(header, rows), _provenance(results)])


def _grid_of(result: Result, prefix: str) -> str:
    """One 4 x 4 grid: tau1 down, tau2 across; the chosen pair is bold."""
    grid = result["tau_grid"]
    taus = sorted({int(t) for t in re.findall(r"tau (\d+),", " ".join(grid["metrics"]))})
    chosen = tuple(grid["chosen"][prefix])

    def cell(tau1: int, tau2: int) -> str:
        value = grid["metrics"][f"{prefix} tau {tau1},{tau2}"][result["headline"]]["value"]
        return f"**{value:.3f}**" if (tau1, tau2) == chosen else f"{value:.3f}"

    rows = [[f"tau1 = {a}", *(cell(a, b) for b in taus)] for a in taus]
    title = f"{_title(result)}, {prefix} bit: {result['headline']} on {grid['samples']} samples"
    return f"{title}\n\n" + markdown_table(["", *(f"tau2 = {b}" for b in taus)], rows)


def tau_grids(results: Sequence[Result]) -> str:
    """All grids of tau on the calibration split."""
    searched = [result for result in results if result["tau_grid"]]
    grids = [_grid_of(r, prefix) for r in searched for prefix in r["tau_grid"]["chosen"]]
    if not grids:
        return "No grid was searched for these results."
    return "\n\n".join([*grids, _provenance(results)])


def text_table(results: Sequence[Result]) -> str:
    """Schemes of each text model: true and nominal bits, perplexity and its change."""
    tables = []
    for result in results:
        rows = []
        for label, scheme in result["schemes"].items():
            scheme = scheme | {"memory": with_16_bit_numbers(scheme, result["dtype"])}
            memory, change = scheme["memory"], scheme["difference"]
            bits = (f"{memory[name]:.2f}" for name in ("nominal_bits", "bits_per_element"))
            cells = (with_interval(scheme["perplexity"]), with_interval(change))
            rows.append([label, *bits, _kilobytes(scheme, result["documents"]), *cells])
        header = ["scheme", "nominal bits", "true bits", "KB per document"]
        header += ["perplexity", "minus unquantized"]
        title = (
            f"{result['model']}, {result['dtype']}, {result['documents']} documents of up to "
            f"{result['context']} tokens, {result['window']} recent tokens in every window; bytes "
            "of unquantized numbers are those of 16 bit:"
        )
        note = f"*± half the 95 % bootstrap interval; {source(result)}.*"
        tables += [title, markdown_table(header, rows), note]
    return "\n\n".join(tables)


def _kilobytes(scheme: Result, samples: int) -> str:
    return f"{scheme['memory']['total_bytes'] / samples / 1000:,.0f}"


def scheme_table(results: Sequence[Result]) -> str:
    """Schemes of each task: nominal and true bits, bytes, score and divergence from 16 bit."""
    tables = []
    header = ["scheme", "nominal bits", "true bits, pictures", "true bits, whole cache"]
    for result in results:
        rows = []
        for label, scheme in result["schemes"].items():
            memory, kl = scheme["memory"], scheme["metrics"].get("kl")
            cells = [f"{memory['nominal_bits']:.2f}"]
            # A stream has no bits of pictures alone.
            cells.append(_visual_bits(scheme) if memory.get("visual_bits_per_element") else "")
            cells += [f"{memory['bits_per_element']:.2f}", _kilobytes(scheme, result["samples"])]
            cells.append(_quality_cell(result, label, result["headline"]))
            rows.append([_row_name(label, scheme), *cells, with_interval(kl, 4) if kl else ""])
        title = f"{_title(result)}, {result['samples']} samples, windows of {result['window']}:"
        columns = [*header, "KB per sequence", result["headline"], "KL (nats)"]
        tables += [title, markdown_table(columns, rows)]
    legend = ["Bold: the paired 95 % interval of the difference from 16 bit contains zero."]
    legend += [EIGHT_BITS_NOTE] if f"({EIGHT_BITS})" in "".join(tables) else []
    return "\n\n".join([*tables, *legend, _provenance(results)])


# Of rows of schemes that once had windows in 8-bit floats.
EIGHT_BITS_NOTE = (
    f"Rows marked *{EIGHT_BITS}* are of a window of 64 tokens in 8-bit floats, as `duotone-stream` "
    "and `duotone-mixed` had when they were made; both have 96 tokens in 16 bit."
)


def _row_name(label: str, scheme: Result) -> str:
    """A row's label, and what it was measured with where the label does not say so."""
    spec = scheme.get("configuration", {}).get("spec")
    return f"{label} ({EIGHT_BITS})" if has_8_bit_window(spec) and "fp8" not in label else label


RENDERERS: dict[str, tuple[str, Callable[[Sequence[Result]], str]]] = {
    "quality": ("duotone.quality/1", quality_table),
    "quality-summary": ("duotone.quality/1", quality_summary),
    "divergence": ("duotone.quality/1", divergence_table),
    "tau-grids": ("duotone.quality/1", tau_grids),
    "schemes": ("duotone.schemes/1", scheme_table),
    "text": ("duotone.text/1", text_table),
    "kernels": ("duotone.kernels/1", kernel_table),
    "kernels-summary": ("duotone.kernels/1", kernel_summary),
    "kernels-innerq": ("duotone.kernels/1", innerq_table),
    "kernels-packing": ("duotone.kernels/1", packing_table),
    "mquant-prefill": ("duotone.mquant.speed/1", prefill_table),
    "mquant-static": ("duotone.mquant.speed/1", static_table),
    "mquant-decode": ("duotone.mquant.speed/1", decode_table),
    "mquant-steps": ("duotone.mquant.speed/1", step_table),
    "mquant-model": ("duotone.mquant.model/1", model_table),
    "mquant-paper": ("duotone.mquant.speed/1", paper_table),
    "mquant-quality": ("duotone.mquant.quality/1", mquant_quality_table),
    "mquant-split": ("duotone.mquant.split/1", split_table),
    "mquant-memory": ("duotone.mquant.memory/1", memory_table),
    "mquant-modality": ("duotone.mquant.modality/1", modality_table),
    "throughput": ("duotone.throughput/1", throughput_table),
    "throughput-predictions": ("duotone.throughput/1", prediction_table),
    "transform-widths": ("duotone.transform.widths/1", widths_table),
    "transform-choices": ("duotone.transform.choices/1", choices_table),
    "transform-robustness": ("duotone.transform.robustness/1", robustness_table),
    "transform-alternatives": ("duotone.transform.alternatives/1", alternatives_table),
    "transform-reach": ("duotone.transform.reach/1", reach_table),
    "transform-text": ("duotone.transform.text/1", transform_text_table),
    "transform-cost": ("duotone.transform.cost/1", cost_table),
    "tune": ("duotone.tune/1", tune_table),
    "tune-comparisons": ("duotone.tune/1", tune_comparisons),
    "tune-scores": ("duotone.tune/1", tune_scores),
    "tune-sensitivity": ("duotone.tune/1", tune_sensitivity),
}


def read_results(folder: Path) -> list[Result]:
    """All result files below `folder` that name their schema, in the order of their paths."""
    if not folder.is_dir():
        raise ValueError(f"--results must be an existing folder, got {str(folder)!r}")
    found = (_read(path) for path in sorted(folder.rglob("*.json")))
    return [data for data in found if isinstance(data, dict) and "schema" in data]


def _read(path: Path) -> Any:
    try:
        return json_text.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"a result file is JSON; got {str(path)!r}: {error}") from error


def _render(render: Callable[[Sequence[Result]], str], schema: str, mine: list[Result]) -> str:
    try:
        return render(mine)
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"results of schema {schema!r} must have its fields; got {len(mine)} files, one of "
            f"which has not: {type(error).__name__} {error}. Write it anew."
        ) from error


def tables(folder: str | Path) -> dict[str, str]:
    """{name: Markdown} of every table there are results for."""
    results = read_results(Path(folder))
    rendered = {}
    for name, (schema, render) in RENDERERS.items():
        mine = [result for result in results if result["schema"] == schema]
        if mine:
            rendered[name] = _render(render, schema, mine)
    return rendered


def update_text(text: str, rendered: Mapping[str, str]) -> str:
    """`text` with every marked table replaced; a marker without results raises ValueError."""

    def replace(match: re.Match) -> str:
        if match["name"] not in rendered:
            raise ValueError(
                f"every marked table needs results, got none for {match['name']!r}; there are "
                f"{sorted(rendered)}: run its benchmark or remove the marker"
            )
        return f"{match['open']}{rendered[match['name']]}\n{match['close']}"

    return _MARKED.sub(replace, text)


def update_file(path: str | Path, rendered: Mapping[str, str], *, write: bool = True) -> bool:
    """Bring the marked tables of a file up to date; returns whether they were not."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"--readme must be an existing file, got {str(path)!r}")
    before = path.read_text(encoding="utf-8")
    after = update_text(before, rendered)
    if write and after != before:
        path.write_text(after, encoding="utf-8")
    return after != before
