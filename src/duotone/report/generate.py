"""Results of `duotone bench generate` as tables: what a user of `model.generate` gets."""

from collections.abc import Sequence
from typing import Any

from duotone.report.markdown import Result, markdown_table, source

PLAIN = "plain"
HEADER = (
    "row",
    "first token, ms",
    "first call",
    "ms per token",
    "first call",
    "longest",
    "first step",
    "tokens/s",
    "x plain",
    "GPU idle",
    "peak, GB",
    "cache, MB",
)
LEGEND = (
    "*First token* and *ms per token* are of warm calls; *first call* has never seen its length "
    "(torch then builds a plan of cuDNN attention for every length that a plain cache grows to). "
    "*Longest* is the longest step after the first 16, *first step* the one after the prompt of "
    "the last call, with the move to fixed buffers. *Peak* is without the weights."
)


def generate_table(results: Sequence[Result]) -> str:
    """One table per model and load."""
    parts = []
    for result in _ordered(results):
        plain = _rows(result).get(PLAIN)
        lines = [_line(row, plain) for row in result["rows"]]
        parts += [f"**{_title(result)}**", markdown_table(HEADER, lines)]
    return "\n\n".join([*parts, LEGEND, f"*{source(*results)}.*"])


def generate_summary(results: Sequence[Result]) -> str:
    """Ms per token and gigabytes of the loads, plain against the first scheme of each file."""
    header = ["", "ms per token", "with `enable`", "", "cache, GB", "with `enable`", ""]
    lines = []
    for result in _ordered(results):
        rows = _rows(result)
        ours = next((row for row in rows.values() if "cache_bytes" in row), None)
        if ours is None or PLAIN not in rows:
            continue
        ms = [row["ms_per_token"] for row in (rows[PLAIN], ours)]
        gb = [ours[name] / 1e9 for name in ("cache_bytes_16_bit", "cache_bytes")]
        lines.append(
            [
                f"{_title(result)}, {ours['row']}",
                *(f"{x:.1f}" for x in ms),
                f"{ms[0] / ms[1]:.1f}x",
                *(f"{x:.2f}" for x in gb),
                f"{gb[0] / gb[1]:.1f}x",
            ]
        )
    return "\n\n".join([markdown_table(header, lines), f"*{source(*results)}.*"])


def _ordered(results: Sequence[Result]) -> list[Result]:
    def place(result: Result) -> tuple:
        load = result["load"]
        return (
            result["model"],
            result["weights"],
            load["batch"],
            load["tokens"],
            load["padded"],
            result["created"],
        )

    return sorted(results, key=place)


def _rows(result: Result) -> dict[str, Any]:
    """Rows that were measured, by name."""
    return {row["row"]: row for row in result["rows"] if "reason" not in row}


def _title(result: Result) -> str:
    load, heads = result["load"], f"{result['q_heads']}/{result['kv_heads']} heads"
    padded = ", left-padded" if load["padded"] else ""
    heads += "" if result["weights"] == "16 bit" else f", weights {result['weights']}"
    tokens = f"{result['prompt_tokens']:,}"
    return f"{result['model']} ({heads}), batch {load['batch']}, {tokens} tokens{padded}"


def _line(row: Result, plain: Result | None) -> list[str]:
    if "reason" in row:
        return [row["row"], row["reason"], *[""] * (len(HEADER) - 2)]
    times = ("ttft_ms", "first_ttft_ms", "ms_per_token", "first_ms_per_token", "longest_ms")
    digits = (0, 0, 2, 1, 1)
    cells = [f"{row[name]:,.{n}f}" for name, n in zip(times, digits, strict=True)]
    cells += [f"{row['first_step_ms']:.0f}", f"{row['tokens_per_s']:,.0f}"]
    cells.append("" if plain is None else f"{row['tokens_per_s'] / plain['tokens_per_s']:.1f}")
    cells.append("" if row["idle"] is None else f"{100 * row['idle']:.0f} %")
    cells.append("" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e9:.2f}")
    cells.append(f"{row['cache_bytes'] / 1e6:,.0f}" if "cache_bytes" in row else "")
    return [row["row"], *cells]
