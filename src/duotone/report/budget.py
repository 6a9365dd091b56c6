"""Results of `duotone bench generate --budget` as tables: batches, steps and whole answers."""

from collections.abc import Mapping, Sequence
from typing import Any

from duotone.report.markdown import Result, markdown_table, source

PLAIN = "plain"
# Rows without a quantized cache, on 16-bit weights: the faster one is the measure of all others.
PLAINS = (PLAIN, "plain, cuDNN off")
# Tokens/s of steps, and of whole answers.
SPEEDS = ("tokens_per_s", "answer_tokens_per_s")
HEADER = (
    "budget, GB",
    "row",
    "batch",
    "step, ms",
    "tokens/s of steps",
    "steps, x plain",
    "tokens/s of answers",
    "answers, x plain",
    "s per prompt",
    "peak, GB",
)
LEGEND = (
    "*Batch*: the largest that fits the budget next to the weights at the end of the answer, or a "
    "smaller one that has more tokens/s (docs/throughput.md). *Step*: in the middle of the answer. "
    "*Answers*: whole ones, whose prompts are read one after the other. *x plain*: against the "
    "faster of `plain` and `plain, cuDNN off` with weights in 16 bit in the same budget. *Peak*: "
    "of tensors, without the weights. *calibrated@1*: as `duotone calibrate` makes it, with random "
    "bases."
)
SUMMARY_LEGEND = (
    "Tokens/s of steps and the batch, which fits the budget next to the weights; in brackets times "
    "the faster of `plain` and `plain, cuDNN off`: in steps / in whole answers with their prompts."
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
    names, parts = _names(results), []
    for place in sorted(groups):
        found = [result for _, result in sorted(groups[place].items())]
        lines = [_line(result, row) for result in found for row in _measured(result)]
        parts += [f"**{title(found[0])}**", markdown_table(HEADER, lines)]
        parts += ["  \n".join(notes)] if (notes := _notes(found, names)) else []
    return "\n\n".join([*parts, LEGEND, f"*{_source(results)}.*"])


def budget_summary(results: Sequence[Result]) -> str:
    """A line per model and length, of its largest budget, and each row's range over all budgets."""
    largest: dict[tuple, Result] = {}
    for result in sorted(results, key=lambda one: one["budget_bytes"]):
        largest[_place(result)] = result
    found = [result for _, result in sorted(largest.items())]
    names = _names(found)
    lines = []
    for one in found:
        rows = {row["row"]: row for row in _measured(one) if row["batch"]}
        cells = [_summed_up(rows.get(name), _plain(one)) for name in names]
        place = f"{one['model']}, {one['visual_tokens']:,}, {one['budget_bytes'] / 1e9:g} GB"
        lines.append([place, *cells])
    table = markdown_table(("model, visual tokens, budget", *names), lines)
    return "\n\n".join([table, SUMMARY_LEGEND, _ranges(results), f"*{_source(found)}.*"])


def _source(results: Sequence[Result]) -> str:
    """Devices and commits of all files, and of rows that later runs added."""
    later = [
        {**result, "created": row["created"], "commit": row["commit"]}
        for result in results
        for row in _measured(result)
        if "commit" in row
    ]
    return source(*results, *later)


def _summed_up(row: Mapping[str, Any] | None, plain: Mapping[str, float]) -> str:
    """Tokens/s and batch of a row, and its ratios to plain."""
    if row is None:
        return ""
    cell = f"{row['tokens_per_s']:,.0f}, batch {row['batch']}"
    ratios = _ratios(row, plain)
    if row["row"] in PLAINS or not ratios:
        return cell
    return f"{cell} ({' / '.join(f'{ratio:.1f} x' for ratio in ratios)})"


def _ranges(results: Sequence[Result]) -> str:
    """A line per row: its ratios to plain in all budgets of all models."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for result in results:
        for row in _measured(result):
            if row["row"] not in PLAINS and row["batch"]:
                found.setdefault(row["row"], []).append(_ratios(row, _plain(result)))
    lines = []
    for name, ratios in found.items():
        if known := list(filter(None, ratios)):
            steps, answers = zip(*known, strict=True)
            lines.append(
                f"- `{name}`: {min(steps):.1f} to {max(steps):.1f} x plain in steps, "
                f"{min(answers):.1f} to {max(answers):.1f} x in whole answers "
                f"({len(known)} settings)."
            )
    return "\n".join(lines)


def _plain(result: Result) -> dict[str, float]:
    """The most tokens/s of rows without a quantized cache: of steps, and of answers."""
    plains = [row for row in _measured(result) if row["row"] in PLAINS and row["batch"]]
    return {name: max(row[name] for row in plains) for name in SPEEDS} if plains else {}


def _ratios(row: Mapping[str, Any], plain: Mapping[str, float]) -> tuple[float, ...]:
    """Times plain: of steps, and of answers; empty where plain does not fit."""
    return tuple(row[name] / plain[name] for name in SPEEDS) if plain else ()


def _names(results: Sequence[Result]) -> list[str]:
    return list(dict.fromkeys(row["row"] for one in results for row in _measured(one)))


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
        return [*begin, *[""] * (len(HEADER) - len(begin))]
    speeds = []
    for name, ratio in zip(SPEEDS, _ratios(row, _plain(result)) or ("", ""), strict=True):
        speeds += [f"{row[name]:,.0f}", ratio and f"{ratio:.1f}"]
    peak = row["peak_bytes"]
    return [
        *begin,
        f"{row['step_ms']:.2f}",
        *speeds,
        f"{row['read_s']:.2f}",
        "" if peak is None else f"{peak / 1e9:.1f}",
    ]


def _notes(results: Sequence[Result], names: Sequence[str]) -> list[str]:
    """Lines of notes of rows, and of reasons why rows were not measured.

    names: of rows that some result has.
    """
    lines: dict[tuple, list[str]] = {}
    for result in results:
        size = f"{result['budget_bytes'] / 1e9:g}"
        for row in result["rows"]:
            for note in row.get("notes", [row.get("reason")]):
                lines.setdefault((row["row"], note), []).append(size)
        for name in sorted(set(names) - {row["row"] for row in result["rows"]}, key=names.index):
            lines.setdefault((name, "not measured yet"), []).append(size)
    return [f"*{row}* ({', '.join(sizes)} GB): {note}." for (row, note), sizes in lines.items()]
