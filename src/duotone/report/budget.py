"""Results of `duotone bench generate --budget` as tables: batches, steps and whole answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from duotone.report.markdown import Result, markdown_table, source
from duotone.report.papers import CALIBQUANT, PAPER_GPU, tokens_per_s

PLAIN = "plain"
# Rows that correspond to a row of the paper, by its bits.
PAPER_BITS = {
    PLAIN: 16,
    "duotone@1": 1,
    "calibrated@1": 1,
    "calibquant@1": 1,
    "duotone@2": 2,
    "calibquant@2": 2,
}
HEADER = (
    "budget, GB",
    "row",
    "batch",
    "step, ms",
    "tokens/s of steps",
    "x plain",
    "with the prompts",
    "x plain",
    "s per prompt",
    "peak, GB",
    f"CalibQuant ({PAPER_GPU}), tokens/s of steps",
)
LEGEND = (
    "*Batch*: the largest that fits the budget beside the weights at the end of the answer, or a "
    "smaller one that has more tokens/s (docs/throughput.md). *Step*: in the middle of the answer. "
    "*With the prompts*: tokens/s of whole answers, whose prompts are read one after the other. *x "
    "plain*: against `plain` with weights in 16 bit in the same budget. *calibrated@1*: as "
    "`duotone calibrate` makes it, with random bases. CalibQuant's numbers are its batch over its "
    "time of a step (its Tables 7 and 8 print other batches' numbers)."
)


def budget_table(results: Sequence[Result]) -> str:
    """One table per model and length, a line per budget and row.

    Errors: ValueError for two results of one model, length and budget.
    """
    groups: dict[tuple, dict[int, Result]] = {}
    for result in results:
        budgets = groups.setdefault(_place(result), {})
        if result["budget_bytes"] in budgets:
            raise ValueError(
                f"a budget has one result; got two of {title(result)}, "
                f"{result['budget_bytes'] / 1e9:g} GB. Remove one."
            )
        budgets[result["budget_bytes"]] = result
    parts = []
    for place in sorted(groups):
        found = [result for _, result in sorted(groups[place].items())]
        lines = [_line(result, row) for result in found for row in _measured(result)]
        parts += [f"**{title(found[0])}**", markdown_table(HEADER, lines)]
        parts += ["  \n".join(notes)] if (notes := _notes(found)) else []
    return "\n\n".join([*parts, LEGEND, f"*{source(*results)}.*"])


def budget_summary(results: Sequence[Result]) -> str:
    """A line per model and length, of its largest budget: each row against `plain`."""
    largest: dict[tuple, Result] = {}
    for result in sorted(results, key=lambda one: one["budget_bytes"]):
        largest[_place(result)] = result
    found = [result for _, result in sorted(largest.items())]
    names = list(dict.fromkeys(row["row"] for one in found for row in _measured(one)))
    lines = []
    for one in found:
        rows = {row["row"]: row for row in _measured(one) if row["batch"]}
        cells = [_against(rows.get(name), rows.get(PLAIN)) for name in names]
        lines.append([f"{title(one)}, {one['budget_bytes'] / 1e9:g} GB", *cells])
    table = markdown_table(("tokens/s of steps (x plain; of whole answers)", *names), lines)
    return f"{table}\n\n*{source(*found)}.*"


def _against(row: Mapping[str, Any] | None, plain: Mapping[str, Any] | None) -> str:
    """Tokens/s of a row, and its ratios to plain."""
    if row is None:
        return ""
    speed = f"{row['tokens_per_s']:,.0f}"
    if plain is None or row is plain:
        return speed
    ratios = (row[n] / plain[n] for n in ("tokens_per_s", "answer_tokens_per_s"))
    return f"{speed} ({'; '.join(f'{ratio:.1f}' for ratio in ratios)})"


def _place(result: Result) -> tuple:
    tokens = (result["visual_tokens"], result["prompt_tokens"], result["new_tokens"])
    return (result["model"], *tokens, result["device"])


def title(result: Result) -> str:
    """A model and the tokens of its sequences in words."""
    return (
        f"{result['model']} ({result['q_heads']}/{result['kv_heads']} heads), "
        f"{result['visual_tokens']:,} visual tokens, {result['prompt_tokens']} of prompt, "
        f"{result['new_tokens']} generated"
    )


def _measured(result: Result) -> list[Mapping[str, Any]]:
    return [row for row in result["rows"] if "reason" not in row]


def _line(result: Result, row: Mapping[str, Any]) -> list[str]:
    begin = [f"{result['budget_bytes'] / 1e9:g}", row["row"], str(row["batch"])]
    if not row["batch"]:
        return [*begin, *[""] * (len(HEADER) - len(begin) - 1), _paper(result, row)]
    plain = next((r for r in _measured(result) if r["row"] == PLAIN and r["batch"]), None)
    speeds = []
    for name in ("tokens_per_s", "answer_tokens_per_s"):
        speeds += [f"{row[name]:,.0f}", "" if plain is None else f"{row[name] / plain[name]:.1f}"]
    peak = row["peak_bytes"]
    return [
        *begin,
        f"{row['step_ms']:.2f}",
        *speeds,
        f"{row['read_s']:.2f}",
        "" if peak is None else f"{peak / 1e9:.1f}",
        _paper(result, row),
    ]


def _paper(result: Result, row: Mapping[str, Any]) -> str:
    bits = PAPER_BITS.get(row["row"], 0)
    budgets = CALIBQUANT.get((result["model"], result["visual_tokens"], bits), {})
    theirs = budgets.get(round(result["budget_bytes"] / 1e9))
    return "" if theirs is None else f"{tokens_per_s(theirs):,.0f}"


def _notes(results: Sequence[Result]) -> list[str]:
    """Lines of notes of rows, and of reasons why rows were not measured."""
    lines = {}
    for result in results:
        for row in result["rows"]:
            for note in row.get("notes", [row.get("reason")]):
                lines.setdefault((row["row"], note), []).append(f"{result['budget_bytes'] / 1e9:g}")
    return [f"*{row}* ({', '.join(sizes)} GB): {note}." for (row, note), sizes in lines.items()]
