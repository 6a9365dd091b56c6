"""Throughput results as tables: batch, speed, and the distance from the limits."""

from collections.abc import Sequence

from duotone.report.markdown import EIGHT_BITS, Result, has_8_bit_window, markdown_table, source
from duotone.report.papers import CALIBQUANT, PAPER_GPU, tokens_per_s

REFERENCE = "16-bit"
# Our rows that correspond to a row of the papers, by its bits.
PAPER_BITS = {
    "16-bit": 16,
    "1-bit visual": 1,
    "1-bit visual, calibrated": 1,
    "2-bit visual": 2,
}
# Of rows whose windows were in 8-bit floats.
EIGHT_BITS_NOTE = (
    f"Rows marked *{EIGHT_BITS}* were measured when our stream had a window of 64 tokens in 8-bit "
    "floats, whose loss had not been measured: ten times KIVI's (KL .0401 for .0034 on stories, "
    "table.md). No scheme has that window now; what ours has, 96 tokens in 16 bit, was not timed. "
    "Take the rows of KIVI's window for what a stream of 2 bits gains."
)
HEADER = (
    "row",
    "batch",
    "step, ms",
    "tokens/s",
    "x 16-bit",
    "ceiling: bytes",
    "ceiling: roofline",
    "of it",
    "of its roofline",
    "prefill, s",
    "sequences/s",
    f"CalibQuant ({PAPER_GPU}), tokens/s",
    "x",
)


def throughput_table(results: Sequence[Result]) -> str:
    """One table per model, visual tokens and budget.

    Errors: ValueError for two results of one line, which would hide each other.
    """
    groups: dict[tuple, dict[str, Result]] = {}
    for result in results:
        at = result["configuration"]
        key = (result["model"]["name"], at["visual"], at["budget_bytes"])
        rows = groups.setdefault(key, {})
        if at["row"] in rows:
            raise ValueError(
                f"a line of the throughput table has one result; got two of {at['row']!r} for "
                f"{key[0]}, {key[1]} visual tokens, {key[2] / 1e9:g} GB. Remove one of them: a "
                "single file whose result is in the model's .jsonl, or a run with other tokens."
            )
        rows[at["row"]] = result
    parts = []
    for (model, visual, budget), rows in sorted(groups.items()):
        some = next(iter(rows.values()))["configuration"]
        title = (
            f"**{model}, {visual} visual tokens, {some['prompt']} of prompt, {some['new']} "
            f"generated, {budget / 1e9:g} GB for caches and activations**"
        )
        order = sorted(rows, key=lambda name: (name != REFERENCE, name))
        lines = [_line(rows[name], rows.get(REFERENCE)) for name in order]
        parts += [title, markdown_table(HEADER, lines)]
    legend = (
        "Ceilings are ratios to the 16-bit row: of the bytes of a sequence at its full length, and "
        "of sequences per roofline time, max(weights / copy, operations / products) + caches / "
        "copy, in the middle of the generation. CalibQuant's tokens/s are its batch over its "
        "time of a step (its Tables 7 and 8 print other batches' numbers)."
    )
    notes = [EIGHT_BITS_NOTE] if any(has_8_bit_window(r.get("spec")) for r in results) else []
    return "\n\n".join([*parts, legend, *notes, f"*{source(*results)}.*"])


def _name(result: Result) -> str:
    """The row's name, and what it was measured with where that is no scheme's any more."""
    name = result["configuration"]["row"]
    return f"{name} ({EIGHT_BITS})" if has_8_bit_window(result.get("spec")) else name


def _line(result: Result, reference: Result | None) -> list[str]:
    at, name = result["configuration"], result["configuration"]["row"]
    if not result["batch"]:
        return [_name(result), "0", *[""] * (len(HEADER) - 2)]
    speed = result["decode_tokens_per_s"]
    cells = [_name(result), str(result["batch"]), f"{1e3 * result['step_s']:.2f}", f"{speed:,.0f}"]
    cells += _against(result, reference)
    share = result.get("roofline_share")
    cells += ["" if share is None else f"{100 * share:.0f} %", f"{result['prefill_s']:.1f}"]
    cells.append(f"{result['sequences_per_s']:.2f}")
    paper = CALIBQUANT.get((result["model"]["name"], at["visual"], PAPER_BITS.get(name, 0)), {})
    row = paper.get(round(at["budget_bytes"] / 1e9))
    if row is None:
        return [*cells, "", ""]
    return [*cells, f"{tokens_per_s(row):,.0f}", f"{speed / tokens_per_s(row):.0f}"]


def _against(result: Result, reference: Result | None) -> list[str]:
    """(ratio to 16 bit, its ceilings by bytes and by rooflines, share of the latter)."""
    if reference is None or not reference["batch"]:
        return [""] * 4
    ratio = result["decode_tokens_per_s"] / reference["decode_tokens_per_s"]
    if "roofline_s" not in result:
        return [f"{ratio:.1f}", "", "", ""]
    by_bytes = result["dense_sequence_bytes"] / result["sequence_bytes"]
    rates = [r["batch"] / r["roofline_s"] for r in (result, reference)]
    ceiling = rates[0] / rates[1]
    return [f"{ratio:.1f}", f"{by_bytes:.1f}", f"{ceiling:.1f}", f"{100 * ratio / ceiling:.0f} %"]


def prediction_table(results: Sequence[Result]) -> str:
    """Today's predictions of `duotone plan` next to the measurements."""
    from duotone.planning.capacity import predict_again

    header = ["model", "n", "GB", "row", "largest batch", "predicted"]
    header += ["step, ms", "predicted", "error"]
    lines = []
    for result in results:
        if not result["batch"] or "predicted" not in result:
            continue
        at = result["configuration"]
        again = predict_again(result)
        error = again.step_s / result["step_s"] - 1
        lines.append(
            [
                result["model"]["name"],
                str(at["visual"]),
                f"{at['budget_bytes'] / 1e9:g}",
                _name(result),
                str(result.get("largest_batch", result["batch"])),
                str(again.max_batch),
                f"{1e3 * result['step_s']:.2f}",
                f"{1e3 * again.step_s:.2f}",
                f"{100 * error:+.0f} %",
            ]
        )
    return markdown_table(header, lines)
