"""Results of `duotone bench serve` as a table."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from duotone.report.markdown import Result, markdown_table, source

BASE, OURS = "bf16", "duotone_2bit"
# {row: its name in the summary}
OTHERS = {BASE: "the tokens of 16 bit", "fp8": "FP8's"}
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
    """How many times the tokens of other caches 2 bits give, where all requests come at once."""
    said = []
    for one in results:
        best = {row["row"]: most for row in one["rows"] if (most := _at_once(row))}
        if {BASE, OURS} <= best.keys():
            others = [
                f"{best[OURS] / best[name]:.2f} times {words}"
                for name, words in OTHERS.items()
                if name in best
            ]
            said.append(
                f"With {one['cache_bytes'] / 1e9:g} GB of cache, and prompts of "
                f"{one['input_tokens']:,} tokens, a server on 2 bits gives "
                f"{' and '.join(others)} ({one['device']})."
            )
    return "\n".join(said)


def _requests(one: Result) -> str:
    if one.get("waves"):
        return f"{one['waves']} times the requests that a row's cache holds"
    return f"{one['prompts']} requests per rate"


def _at_once(row: Result) -> float | None:
    """Tokens per second with all requests sent at once, where that was measured."""
    return next((x["tokens_per_s"] for x in row.get("rates", ()) if x["rate"] == "inf"), None)


def _line(row: Result, rate: Result) -> list[str]:
    cells = [_cell(rate.get(field), form) for field, form in COLUMNS.values()]
    backends = ", ".join(row["backends"])
    return [row["row"], backends, _cell(row["cache_tokens"], ",d"), rate["rate"], *cells]


def _cell(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
