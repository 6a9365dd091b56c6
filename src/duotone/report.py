"""Result files to Markdown tables; numbers in a README come from here and are never typed.

Imports no other room and needs neither a GPU nor a model. A table of a README stands between
`<!-- duotone:NAME -->` and `<!-- /duotone:NAME -->` and is replaced as a whole.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

REFERENCE = "16-bit"
Result = Mapping[str, Any]
_MARKED = re.compile(
    r"(?P<open><!-- duotone:(?P<name>[\w-]+) -->\n).*?(?P<close><!-- /duotone:(?P=name) -->)", re.S
)


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A GitHub table; pipes inside cells are escaped."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


def with_interval(interval: Mapping[str, float], digits: int = 3) -> str:
    """Value and half the width of its interval: '0.912 ± 0.014'."""
    half_width = (interval["high"] - interval["low"]) / 2
    return f"{interval['value']:.{digits}f} ± {half_width:.{digits}f}"


def _provenance(results: Sequence[Result]) -> str:
    """One line: samples, model, device, versions, commit and date of the newest file."""
    newest = max(results, key=lambda result: result["created"])
    samples = " / ".join(str(result["samples"]) for result in results)
    return f"*{samples} samples; ± half the 95 % bootstrap interval; {_source(newest)}.*"


def _source(result: Result) -> str:
    """Device, versions, commit and date."""
    tools = ", ".join(f"{k} {v}" for k, v in result["versions"].items() if k != "python")
    commit = (result["commit"] or "no commit")[:10]
    return f"{result['device']}; {tools}; commit {commit}; {result['created'][:10]}"


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
            memory, change = scheme["memory"], scheme["difference"]
            bits = (f"{memory[name]:.2f}" for name in ("nominal_bits", "bits_per_element"))
            cells = (with_interval(scheme["perplexity"]), with_interval(change))
            rows.append([label, *bits, *cells])
        header = ["scheme", "nominal bits", "true bits", "perplexity", "minus unquantized"]
        title = (
            f"{result['model']}, {result['dtype']}, {result['documents']} documents of up to "
            f"{result['context']} tokens, {result['window']} recent tokens in every window:"
        )
        note = f"*± half the 95 % bootstrap interval; {_source(result)}.*"
        tables += [title, markdown_table(header, rows), note]
    return "\n\n".join(tables)


def _small(value: float) -> str:
    """Three digits of a divergence, whatever its size."""
    return f"{value:.3g}"


def _tune_source(report: Result) -> str:
    """What a search ran on, and where."""
    parts = report["settings"]["tasks"]
    samples = ", ".join(
        f"{p['task']} {p['search_samples']} / {p['heldout_samples']}" for p in parts
    )
    trials = report["trials"]
    return (
        f"*Samples searched on / held out: {samples}; {trials['measured']} trials measured, "
        f"{trials['pruned']} given up early, {report['seconds']:.0f} s in all; {_source(report)}.*"
    )


def tune_table(results: Sequence[Result]) -> str:
    """Held-out divergence of what searches chose, and of every known scheme, by rising bits."""
    tables = []
    for report in results:
        numbers, budget = report["heldout"], report["budget"]
        tasks = list(numbers["chosen"]["tasks"])
        labels = sorted(numbers, key=lambda label: (numbers[label]["bits"], label != "chosen"))
        rows = []
        for label in labels:
            cells = (with_interval(numbers[label]["tasks"][task]["kl"], 4) for task in tasks)
            name = f"**{label}**" if label == "chosen" else label
            row = [name, f"{numbers[label]['bits']:.2f}", _small(numbers[label]["kl"]), *cells]
            rows.append(row)
        of = "visual number" if budget["of"] == "visual" else "number"
        header = ["spec", f"true bits per {of}", "KL, geometric mean", *(f"{t}, KL" for t in tasks)]
        title = f"{report['settings']['model']['name']}, budget {budget['bits']:.2f} bits:"
        tables += [title, markdown_table(header, rows), _tune_source(report)]
    return "\n\n".join(tables)


def tune_comparisons(results: Sequence[Result]) -> str:
    """Every published scheme beside the front's best point of no more bits, held out."""
    tables = []
    for report in results:
        rows = []
        for row in report["comparisons"]:
            ours = ["none of so few bits", "", ""]
            if "by" in row:
                ours = [f"{row['its_bits']:.2f}", _small(row["its_kl"]), _factor(row)]
            rows.append([row["label"], f"{row['bits']:.2f}", _small(row["kl"]), *ours])
        header = ["published", "true bits", "KL", "found: true bits", "KL", "KL ratio"]
        tables += [markdown_table(header, rows), _tune_source(report)]
    return "\n\n".join(tables)


def _factor(row: Result) -> str:
    """How many times smaller the found divergence is; bold where it is not."""
    ratio = row["kl"] / row["its_kl"] if row["its_kl"] else float("inf")
    return f"{ratio:.1f}x" if row["beaten"] else f"**{ratio:.2f}x**"


def tune_sensitivity(results: Sequence[Result]) -> str:
    """KL with K or V of one layer at 2 bits and all else at 8."""
    tables = []
    for report in results:
        found = report["sensitivity"]
        pairs = zip(found["key"], found["value"], strict=True)
        rows = [[str(i), _small(key), _small(value)] for i, (key, value) in enumerate(pairs)]
        rows.append(["none", _small(found["baseline"]), _small(found["baseline"])])
        tables.append(markdown_table(["layer at 2 bits", "K, KL", "V, KL"], rows))
    return "\n\n".join(tables)


def tune_scores(results: Sequence[Result]) -> str:
    """Task scores of the answers that the chosen spec and its rivals give, held out."""
    tables = []
    for scores in (report["scores"] for report in results if report["scores"]):
        header = ["spec", *(f"{task}, {data['headline']}" for task, data in scores.items())]
        labels = dict.fromkeys(label for data in scores.values() for label in data["schemes"])
        rows = [
            [label, *(with_interval(d["schemes"][label][d["headline"]]) for d in scores.values())]
            for label in labels
        ]
        tables.append(markdown_table(header, rows))
    return "\n\n".join(tables)


def tune_page(report: Result, plot: str | None = None) -> str:
    """The page of one search: its tables and, beside it, the plot's file."""
    sections = [
        f"# duotone tune: {report['settings']['model']['name']}",
        "`--scheme spec.json` gives every command the chosen spec.",
        *([f"![front]({plot})"] if plot else []),
        "## Held out",
        tune_table([report]),
        "## Published schemes, and what was found at no more bits",
        tune_comparisons([report]),
        *(["## Task scores, held out", tune_scores([report])] if report["scores"] else []),
        "## Sensitivity of the layers",
        tune_sensitivity([report]),
    ]
    return "\n\n".join(sections) + "\n"


RENDERERS: dict[str, tuple[str, Callable[[Sequence[Result]], str]]] = {
    "quality": ("duotone.quality/1", quality_table),
    "quality-summary": ("duotone.quality/1", quality_summary),
    "divergence": ("duotone.quality/1", divergence_table),
    "tau-grids": ("duotone.quality/1", tau_grids),
    "text": ("duotone.text/1", text_table),
    "tune": ("duotone.tune/1", tune_table),
    "tune-comparisons": ("duotone.tune/1", tune_comparisons),
    "tune-scores": ("duotone.tune/1", tune_scores),
    "tune-sensitivity": ("duotone.tune/1", tune_sensitivity),
}


def read_results(folder: Path) -> list[Result]:
    """All result files below `folder` that name their schema, in the order of their paths."""
    if not folder.is_dir():
        raise ValueError(f"--results must be an existing folder, got {str(folder)!r}")
    found = (
        json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.json"))
    )
    return [data for data in found if isinstance(data, dict) and "schema" in data]


def tables(folder: str | Path) -> dict[str, str]:
    """{name: Markdown} of every table there are results for."""
    results = read_results(Path(folder))
    rendered = {}
    for name, (schema, render) in RENDERERS.items():
        mine = [result for result in results if result["schema"] == schema]
        if mine:
            rendered[name] = render(mine)
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
