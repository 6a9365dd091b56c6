"""Results of `duotone bench generate` as tables: what a user of `model.generate` gets."""

from collections.abc import Sequence
from typing import Any

from duotone.defaults import CONVERSATIONS, PICTURES
from duotone.report.markdown import Result, markdown_table, source

PLAIN, NO_CUDNN, STATIC = "plain", "plain, cuDNN off", "StaticCache, compiled"
# Columns: title, field of a row, unit, format. Older results lack some fields; of no field is the
# ratio to plain.
COLUMNS = (
    ("first token, ms", "ttft_ms", 1, ",.0f"),
    ("first call", "first_ttft_ms", 1, ",.0f"),
    ("question, ms", "question_ttft_ms", 1, ",.0f"),
    ("ms per token", "ms_per_token", 1, ".2f"),
    ("first call", "first_ms_per_token", 1, ".1f"),
    ("longest", "longest_ms", 1, ",.1f"),
    ("first step", "first_step_ms", 1, ",.0f"),
    ("first call", "first_call_step_ms", 1, ",.0f"),
    ("tokens/s", "tokens_per_s", 1, ",.0f"),
    ("x plain", None, 1, ".1f"),
    ("with the prompt", "answer_tokens_per_s", 1, ",.0f"),
    ("peak, GB", "peak_bytes", 1e9, ".2f"),
    ("cache, MB", "cache_bytes", 1e6, ",.1f"),
)
# Left out where no row has it.
OPTIONAL = ("question_ttft_ms",)
LEGEND = (
    "*First token* and *ms per token* are of warm calls; *first call* has never seen its length "
    "(torch then builds a plan of cuDNN attention for every length that a plain cache grows to). "
    "*Longest* is the longest step after the first 16, *first step* the one after the prompt; of "
    "the first call it is the longest of the first 16, which compiles and captures. *Tokens/s* are "
    "of steps, *with the prompt* of whole answers. *Peak* is without the weights, *cache* at the "
    "end of an answer, free slots included."
)
QUESTION = (
    "*Question* is the time to the first token of an answer to a question in words, of a length "
    "that no call has seen, after the last answer."
)
NO_GPU = "Without a GPU nothing is captured, and peaks are empty."


def generate_table(results: Sequence[Result]) -> str:
    """One table per model and load.

    Errors: ValueError for two results of one model and load, which would be told apart by nothing.
    """
    parts, asked = [], False
    for result in ordered(results):
        rows = rows_by_name(result)
        columns = [x for x in COLUMNS if x[1] not in OPTIONAL or _has(rows, x[1])]
        lines = [_line(row, rows.get(PLAIN), columns) for row in rows.values()]
        heading = f"**{title(result)}{_card(result, results)}**"
        header = ["row", *(title for title, *_ in columns)]
        parts += [heading, markdown_table(header, lines), *_notes(result)]
        asked = asked or _has(rows, "question_ttft_ms")
    legend = [LEGEND, *([QUESTION] if asked else [])]
    without = [NO_GPU] if any(result.get("left_out") for result in results) else []
    return "\n\n".join([*parts, *legend, *without, f"*{source(*results)}.*"])


def _has(rows: dict[str, Any], field: str) -> bool:
    return any(row.get(field) is not None for row in rows.values())


def generate_summary(results: Sequence[Result]) -> str:
    """Ms per token and gigabytes of each load: plain, static, `enable` with and without a recipe.

    A column that no result has is left out.
    """
    found = [summary for result in ordered(results) if (summary := summarized(result))]
    recipes = sorted({one["recipe"] for one in found if one["recipe"]})
    names = ["plain", "compiled StaticCache", "`enable`", f"`enable`, {', '.join(recipes)}"]
    used = [i for i in range(len(names)) if any(one["ms"][i] is not None for one in found)]
    header = ["ms per token", *(names[i] for i in used), "cache, GB", "`enable`"]
    lines = [_summary_line(one, used, _card(one, results)) for one in found]
    table = markdown_table(header, lines)
    plain = "plain is the faster of cuDNN attention on and off"
    return f"{table}\n\n*Warm; {plain}; {source(*results)}.*"


def summarized(result: Result) -> dict[str, Any] | None:
    """Plain rows against a row of `enable`: of its default, where measured. None without both.

    ms: of a token, of plain, of the compiled static cache (or None), of `enable`, and of `enable`
    on quantized weights (or None). recipe: of these weights, or None. gb: of the caches of plain
    and of `enable`.
    """
    rows = rows_by_name(result)
    plain = [rows[name] for name in (PLAIN, NO_CUDNN) if name in rows]
    ours = {name: row for name, row in rows.items() if "graph_bytes" in row}
    if not plain or not ours:
        return None
    chosen = next(name for name in (CONVERSATIONS, PICTURES, *ours) if name in ours)
    mine = ours[chosen]
    coded = next(
        (row for name, row in ours.items() if name == f"{chosen}, {row.get('weights')}"), None
    )
    static = rows.get(STATIC)
    return {
        "title": title(result),
        "device": result["device"],
        "row": chosen,
        "recipe": None if coded is None else coded["weights"],
        "ms": (
            min(row["ms_per_token"] for row in plain),
            None if static is None else static["ms_per_token"],
            mine["ms_per_token"],
            None if coded is None else coded["ms_per_token"],
        ),
        "gb": (
            plain[0].get("cache_bytes", mine["cache_bytes_16_bit"]) / 1e9,
            mine["cache_bytes"] / 1e9,
        ),
    }


def fastest_plain(result: Result) -> dict[str, float]:
    """Ms per token of the rows without `enable` that were measured, the faster of plain ones."""
    rows = rows_by_name(result)
    plain = [rows[name]["ms_per_token"] for name in (PLAIN, NO_CUDNN) if name in rows]
    static = {"static_ms": rows[STATIC]["ms_per_token"]} if STATIC in rows else {}
    return {**({"plain_ms": min(plain)} if plain else {}), **static}


def _card(one: Result, results: Sequence[Result]) -> str:
    """Name of a result's card after a comma, where results are of several."""
    several = len({result["device"] for result in results}) > 1
    return f", {one['device']}" if several else ""


def _summary_line(summary: dict[str, Any], used: Sequence[int], card: str) -> list[str]:
    ms, (dense, few) = summary["ms"], summary["gb"]
    times = [_number(ms[i], 1, ".1f") for i in used]
    return [f"{summary['title']}, {summary['row']}{card}", *times, f"{dense:.2f}", f"{few:.2f}"]


def ordered(results: Sequence[Result]) -> list[Result]:
    """Results by model and load. Errors: ValueError for two of one model and load."""
    by_place: dict[tuple, Result] = {}
    for result in results:
        place = _place(result)
        if place in by_place:
            raise ValueError(
                f"a table of generate has one result; got two of {title(result)}. Remove one."
            )
        by_place[place] = result
    return [by_place[place] for place in sorted(by_place)]


def _place(result: Result) -> tuple:
    load = result["load"]
    load = (load["batch"], load["tokens"], load["padded"], _picture_tokens(result) or 0)
    return (result["model"], result["weights"], *load, result["device"])


def _picture_tokens(result: Result) -> int | None:
    """Tokens of a picture, where the load names them; files of before have no such field."""
    return result["load"].get("picture_tokens")


def rows_by_name(result: Result) -> dict[str, Any]:
    """Rows that were measured, by name."""
    return {row["row"]: row for row in result["rows"] if "reason" not in row}


def title(result: Result) -> str:
    """A model and its load in words."""
    load, heads = result["load"], f"{result['q_heads']}/{result['kv_heads']} heads"
    padded = ", left-padded" if load["padded"] else ""
    heads += "" if result["weights"] == "16 bit" else f", weights {result['weights']}"
    tokens = f"{result['prompt_tokens']:,}"
    each = _picture_tokens(result)
    pictures = "" if each is None else f" in pictures of {each}"
    return f"{result['model']} ({heads}), batch {load['batch']}, {tokens} tokens{pictures}{padded}"


def _line(row: Result, plain: Result | None, columns: Sequence[tuple]) -> list[str]:
    ratio = None if plain is None else row["tokens_per_s"] / plain["tokens_per_s"]
    found = ((ratio if field is None else row.get(field), *form) for _, field, *form in columns)
    return [row["row"], *(_number(*cell) for cell in found)]


def _number(value: float | None, unit: float, form: str) -> str:
    """A cell; empty for what was not measured."""
    return "" if value is None else f"{value / unit:{form}}"


def _notes(result: Result) -> list[str]:
    """Lines of what rows have to say, and of rows that were not measured."""
    said = [(row["row"], row.get("notes") or [row.get("reason")]) for row in result["rows"]]
    lines = [f"*{name}*: {'; '.join(notes)}." for name, notes in said if notes != [None]]
    return ["  \n".join(lines)] if lines else []
