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
    return f"{counted}; `{result['scheme']}`, {_of(result)}.\n\n{table}"


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
    "supports": ("duotone.supports/1", supports_table),
    "supports-summary": ("duotone.supports/1", supports_summary),
}
