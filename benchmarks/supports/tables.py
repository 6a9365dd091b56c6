"""Tables of `table.py`: schema duotone.supports/1."""

from collections import Counter
from collections.abc import Sequence

from duotone.report.markdown import Result, markdown_table

HEADER = ("model type", "cache", "decode graphs", "weights", "video", "tested with")
# In the order of the table.
GROUPS = ("works", "works untested", "refused", "not checked")


def group(row: Result) -> str:
    """The row's place in `GROUPS`, by its cache."""
    if row["cache"] is not None:
        return "refused"
    if "not_made" in row:
        return "not checked"
    return "works" if row["tested"] else "works untested"


def supports_table(results: Sequence[Result]) -> str:
    """All types: tested ones, untested ones that pass all checks, and refusals with their words."""
    result = results[-1]
    rows = sorted(result["rows"], key=lambda row: (GROUPS.index(group(row)), row["model_type"]))
    table = markdown_table(HEADER, [_cells(row) for row in rows])
    counts = Counter(map(group, rows))
    counted = ", ".join(f"{counts[name]} {name}" for name in GROUPS)
    return f"{counted}; {_schemes(rows)}, {_of(result)}.\n\n{table}"


def _schemes(rows: Sequence[Result]) -> str:
    """The scheme of most rows that read pictures, and the other one with its types."""
    by_scheme: dict[str, list[str]] = {}
    for row in rows:
        is_text = row.get("tested") == ["text"]
        by_scheme.setdefault(row["scheme"], []).extend([] if is_text else [row["model_type"]])
    most, *others = sorted(by_scheme, key=lambda name: -len(by_scheme[name]))
    said = [f"`{most}`"]
    for name in others:
        types = ", ".join(f"`{each}`" for each in by_scheme[name])
        said.append(f"`{name}` for text{' and ' * bool(types)}{types}")
    return ", ".join(said)


def supports_summary(results: Sequence[Result]) -> str:
    """How many types are tested, and how many others pass all checks."""
    result = results[-1]
    tested = [row for row in result["rows"] if group(row) == "works"]
    pictures = sum(row["tested"] != ["text"] for row in tested)
    untested = sum(group(row) == "works untested" for row in result["rows"])
    return (
        f"Tested: {len(tested)} model types of {_of(result)}, {pictures} with pictures. "
        f"Untested, and passing all checks: {untested} more."
    )


def hybrids_table(results: Sequence[Result]) -> str:
    """Decode steps and caches of hybrid models, a line per model, prompt and batch."""
    names = list(dict.fromkeys(row["row"] for result in results for row in result["rows"]))
    header = (
        "shape",
        "prompt",
        "batch",
        *(f"{n}, ms" for n in names),
        *(f"{n}, GB" for n in names),
    )
    lines: dict[tuple[str, int, int], dict[str, Result]] = {}
    for result in results:
        for row in result["rows"]:
            of_line = lines.setdefault((result["model"], row["tokens"], row["batch"]), {})
            of_line[row["row"]] = row
    cells = [
        [model, f"{tokens:,}", str(batch)]
        + [_number(rows.get(name), "ms_per_token", 1) for name in names]
        + [_number(rows.get(name), "cache_bytes", 1e9) for name in names]
        for (model, tokens, batch), rows in lines.items()
    ]
    last = results[-1]
    devices = ", ".join(sorted({result["device"] for result in results}))
    said = f"{devices}, torch {last['versions']['torch']}, {_of(last)}."
    return f"{markdown_table(header, cells)}\n\n{said}"


def _number(row: Result | None, name: str, unit: float) -> str:
    """A number of a row, or why there is none."""
    if row is None:
        return "not run"
    if "reason" in row:
        return "out of memory" if "OutOfMemory" in row["reason"] else "failed"
    return f"{row[name] / unit:.2f}"


def _cells(row: Result) -> list[str]:
    kind = group(row)
    name = f"`{row['model_type']}`"
    if kind == "refused":
        return [name, f"refused: {_sentence(row['cache'])}", "", "", "", ""]
    if kind == "not checked":
        return [
            name,
            f"not checked: {_sentence(row['not_made'].partition('; got ')[2])}",
            *[""] * 4,
        ]
    graphs = _cell(kind, row["graphs"], f"refused: {_sentence(row['graphs'] or '')}")
    video = "works" if "video" in row["tested"] else "works untested"
    return [
        name,
        kind,
        graphs,
        _cell(kind, row["weights"], "refused"),
        video if row["takes_video"] else "none",
        ", ".join(row["tested"]),
    ]


def _cell(works: str, why: str | None, refused: str) -> str:
    return works if why is None else refused


def _sentence(text: str) -> str:
    """The first sentence of a refusal, which says rule and cause."""
    return text.partition(". ")[0].rstrip(".")


def _of(result: Result) -> str:
    return f"transformers {result['versions']['transformers']}"


# {name of the table: (schema of its result files, function that renders them)}
RENDERERS = {
    "hybrids": ("duotone.hybrids/1", hybrids_table),
    "supports": ("duotone.supports/1", supports_table),
    "supports-summary": ("duotone.supports/1", supports_summary),
}
