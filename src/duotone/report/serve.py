"""Results of `duotone bench serve` as a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duotone.report.markdown import Result, markdown_table, source

BASE, OURS = "bf16", "duotone_2bit"
# {column: (field of a rate, its format)}
COLUMNS = {
    "requests": ("completed", "d"),
    "tokens/s": ("tokens_per_s", ",.0f"),
    "requests/s": ("requests_per_s", ".2f"),
    "TTFT p50, ms": ("ttft_p50_ms", ",.0f"),
    "TTFT p99, ms": ("ttft_p99_ms", ",.0f"),
    "TPOT p50, ms": ("tpot_p50_ms", ".1f"),
    "TPOT p99, ms": ("tpot_p99_ms", ".1f"),
    "ITL p99, ms": ("itl_p99_ms", ".1f"),
    "most at once": ("most_running", "d"),
}


def serve_table(results: Sequence[Result]) -> str:
    """One table per result, a line per row and request rate; reasons of rows below it."""
    parts = []
    for one in results:
        title = (
            f"**{Path(one['model']).name}, {one['cache_bytes'] / 1e9:g} GB of cache, "
            f"{one['input_tokens']:,} + {one['output_tokens']:,} tokens, "
            f"{_requests(one)}**"
        )
        lines = [_line(row, rate) for row in one["rows"] for rate in row.get("rates", ())]
        header = ("row", "backend", "cache tokens", "requests/s sent", *COLUMNS)
        notes = [
            f"*{row['row']}*: {row['reason'].splitlines()[0]}."
            for row in one["rows"]
            if "reason" in row
        ]
        parts += [title, markdown_table(header, lines), *notes, f"*{source(one)}.*"]
    return "\n\n".join(parts)


def serve_summary(results: Sequence[Result]) -> str:
    """How many times the tokens of 16 bit a server on 2 bits gives, of loads that have both."""
    said = []
    for one in results:
        best = {row["row"]: _best(row) for row in one["rows"] if "rates" in row}
        if {BASE, OURS} <= best.keys():
            said.append(
                f"With {one['cache_bytes'] / 1e9:g} GB of cache, and prompts of "
                f"{one['input_tokens']:,} tokens, a server on 2 bits gives "
                f"{best[OURS] / best[BASE]:.2f} times the tokens of 16 bit ({one['device']})."
            )
    return "\n".join(said)


def _requests(one: Result) -> str:
    if one.get("waves"):
        return f"{one['waves']} times the requests that a row's cache holds"
    return f"{one['prompts']} requests per rate"


def _best(row: Result) -> float:
    return max(rate["tokens_per_s"] for rate in row["rates"])


def _line(row: Result, rate: Result) -> list[str]:
    cells = [_cell(rate.get(field), form) for field, form in COLUMNS.values()]
    backends = ", ".join(row["backends"])
    return [row["row"], backends, _cell(row["cache_tokens"], ",d"), rate["rate"], *cells]


def _cell(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
