"""Tables of `table.py`: schemas duotone.quality/1, duotone.schemes/1 and duotone.text/1."""

import re
from collections.abc import Sequence

from duotone.report.markdown import Result, markdown_table, source, with_interval

REFERENCE = "16-bit"


def provenance(results: Sequence[Result]) -> str:
    """One line: samples, model, device, versions, commits and date of the newest file."""
    samples = " / ".join(str(result["samples"]) for result in results)
    runs = [run for result in results for run in result.get("sources", [result])]
    return f"*{samples} samples; ± half the 95 % bootstrap interval; {source(*runs)}.*"


def visual_bits(scheme: Result) -> str:
    """True bits per number of visual tokens, or of the whole cache where there are none."""
    memory = scheme["memory"]
    bits = memory.get("visual_bits_per_element", memory["bits_per_element"])
    return f"{bits:.2f}"


def _change(value: float, reference: float) -> str:
    """Relative change to 16 bit in percent, in brackets; nothing where 16 bit scores 0."""
    return f" ({100 * (value / reference - 1):+.1f} %)" if reference else ""


# Schemes that have another name since their rows were measured.
RENAMED = {"pyramidinfer": "pyramidinfer-cache"}


def shown(label: str) -> str:
    """Label of a row, with the scheme's name of today."""
    name, at, rest = label.partition(" @")
    return RENAMED.get(name, name) + at + rest


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
    """Rows of SUMMARY by one metric per task, of questions after the pictures if any came so."""
    later = [result for result in results if result["later_question"]] or results
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
            cells.append(_picture_bits(scheme))
            cells += [f"{memory['bits_per_element']:.2f}", _kilobytes(scheme, result["samples"])]
            cells.append(quality_cell(result, label, result["headline"]))
            rows.append([shown(label), *cells, with_interval(kl, 4) if kl else ""])
        heading = f"{title(result)}, {result['samples']} samples, windows of {result['window']}:"
        columns = [*header, "KB per sequence", result["headline"], "KL (nats)"]
        tables += [heading, markdown_table(columns, rows)]
    legend = ["Bold: the paired 95 % interval of the difference from 16 bit contains zero."]
    return "\n\n".join([*tables, *legend, provenance(results)])


# Rows of docs/table.md: a width or two of every kind of scheme.
PICTURES = ("duotone @1", "duotone-whole @1", "calibquant @1", "xquant", "duotone @2")
PICTURES += (
    "calibquant @2",
    "minmax @2",
    "lloyd @2",
    "kivi @2",
    "innerq @2",
    "vl-cache @4",
    "pyramidinfer @4",
)
TEXTS = (REFERENCE, "kivi @2", "kivi-sink @2", "innerq @2", "innerq @2, symmetric")
TEXTS += ("xquant, pairs of V", "kivi @1", "innerq @1", "asymkv")


def _largest(results: Sequence[Result], name: str) -> list[Result]:
    """Results with the most schemes, one per value of the field `name`."""
    found: dict[str, Result] = {}
    for result in results:
        best = found.setdefault(result[name], result)
        if len(result["schemes"]) > len(best["schemes"]):
            found[result[name]] = result
    return list(found.values())


def scheme_summary(results: Sequence[Result]) -> str:
    """Rows of PICTURES: true bits of pictures and divergence from 16 bit, by task."""
    tasks = _largest(results, "task")
    known = _labels(tasks)
    header = ["scheme", "true bits, pictures", *(f"{title(r)}, KL (nats)" for r in tasks)]
    rows = []
    for label in (name for name in PICTURES if name in known):
        found = [result["schemes"].get(label) for result in tasks]
        measured = (one["metrics"].get("kl") if one else None for one in found)
        cells = (with_interval(kl, 4) if kl else "" for kl in measured)
        rows.append([shown(label), _picture_bits(next(filter(None, found))), *cells])
    return "\n\n".join([markdown_table(header, rows), provenance(tasks)])


def _picture_bits(scheme: Result) -> str:
    """True bits of pictures; a stream has no bits of pictures alone."""
    return visual_bits(scheme) if scheme["memory"].get("visual_bits_per_element") else ""


def text_summary(results: Sequence[Result]) -> str:
    """`text_table` with the rows of TEXTS, of the result with the most schemes of each model."""
    return text_table(_largest(results, "model"), TEXTS)


def text_table(results: Sequence[Result], labels: Sequence[str] | None = None) -> str:
    """Schemes of each text model: true and nominal bits, perplexity and its change.

    labels: the rows, those that a result has; all without it.
    """
    tables = []
    for result in results:
        rows = []
        known = result["schemes"]
        for label in known if labels is None else [name for name in labels if name in known]:
            scheme = known[label] | {"memory": _with_16_bit_numbers(known[label], result["dtype"])}
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


def _with_16_bit_numbers(scheme: Result, dtype: str) -> Result:
    """Return a row's memory as a 16-bit model would have it: 16 bits for a number left dense.

    scheme: its "memory", and its "spec" or None, which is dense as a whole. dtype: what the model
    computed in. Only "float32" is counted anew.
    """
    memory, spec = dict(scheme["memory"]), scheme["spec"]
    if dtype != "float32":
        return memory
    dense_bytes = memory["dense_bytes"] if spec else memory["total_bytes"]
    total_bytes = memory["total_bytes"] - dense_bytes // 2
    memory["bits_per_element"] *= total_bytes / memory["total_bytes"]
    memory["total_bytes"] = total_bytes
    return memory if spec else memory | {"nominal_bits": 16.0}


# {name of the table: (schema of its result files, function that renders them)}
RENDERERS = {
    "quality": ("duotone.quality/1", quality_table),
    "quality-summary": ("duotone.quality/1", quality_summary),
    "divergence": ("duotone.quality/1", divergence_table),
    "tau-grids": ("duotone.quality/1", tau_grids),
    "schemes": ("duotone.schemes/1", scheme_table),
    "schemes-summary": ("duotone.schemes/1", scheme_summary),
    "text": ("duotone.text/1", text_table),
    "text-summary": ("duotone.text/1", text_summary),
}
