"""Tables of `speed.py` (schema duotone.mquant.speed/1) and `model.py` (duotone.mquant.model/1), the
paper's beside them.

The paper's numbers: MQuant (arXiv 2502.00425v1), Tables 3, 5 and 7; its GPU is named for Table 7.
"""

from collections.abc import Sequence

from duotone.report.markdown import Result, markdown_table, source

LAYERS = 28
PREFILL = ("w8a8", "w8a8 triton", "w4a8 scratch", "w4a8 fused", "w4a8 g128")
DECODE = ("w8a8", "w4a8", "w4a8 g128", "w4a16 g128")
# Paper's Table 7: the language model's linear layers in prefill, seconds, and our row.
PAPER_LINEARS = (
    ("BF16", 1.690, "chain bf16"),
    ("W4-g128 (AWQ)", 2.057, None),
    ("W4A8 per token, dynamic", 1.253, None),
    ("W4A8 per tensor, static", 1.016, None),
    ("W4A8 MSQ", 1.085, "chain w4a8 static MSQ rows"),
    ("W4A8 MSQ + AIFS", 1.017, "chain w4a8 static AIFS"),
    ("W8A8 per token, dynamic, unfused", None, "chain dynamic unfused"),
    ("W8A8 per token, dynamic, fused where it can be", None, "chain dynamic fused"),
    ("W8A8 MSQ by row scales", None, "chain static MSQ rows"),
)
PAPER_GPU = "RTX 6000 Ada"
# Paper's Table 5, milliseconds of a decode step in bf16 and of the others.
PAPER_DECODE = (
    17.5,
    (
        ("W4A8 per token, dynamic", 16.4),
        ("W4A8 MSQ + AIFS", 13.06),
        ("W4A8 MSQ + AIFS, GEMV", 8.2),
    ),
)
# Paper's Table 3, seconds of the whole model by side of the picture: bf16 and MQuant.
PAPER_WHOLE = (
    (840, 0.261, 0.210),
    (1960, 1.369, 1.112),
    (3080, 5.208, 4.488),
    (5600, 8.380, 7.469),
)


def linear_rows(result: Result, decode: bool) -> list[Result]:
    """The rows of single linears at few tokens, or at many."""
    rows = (row for row in result["rows"] if "linear" in row)
    return [row for row in rows if (row["tokens"] <= 16) == decode]


def _title(row: Result) -> str:
    return f"{row['linear']} ({row['out']:,} x {row['in']:,})"


def _cell(row: Result, label: str, base: str) -> str:
    """Microseconds and speed-up over `base`; nothing where there is no time."""
    us = row["us"].get(label)
    if us is None:
        return ""
    if isinstance(us, str):
        return "failed"
    return f"{us:,.1f} ({row['us'][base] / us:.2f}x)"


def _product_table(rows: Sequence[Result], labels: Sequence[str]) -> str:
    """A column per label that some row has: results are older than the newest rows."""
    labels = [label for label in labels if any(label in row["us"] for row in rows)]
    cells = (
        [_title(row), f"{row['tokens']:,}", f"{row['us']['bf16']:,.1f}"]
        + [_cell(row, label, "bf16") for label in labels]
        for row in rows
    )
    return markdown_table(["linear", "tokens", "bf16, us", *labels], cells)


def _noted(parts: Sequence[str], result: Result) -> list[str]:
    copy = f"device-to-device copy {result['copy_tb_per_s']:.2f} TB/s"
    return [*parts, f"*Medians of CUDA graphs; {copy}; {source(result)}.*"]


def prefill_table(results: Sequence[Result]) -> str:
    """Products of many tokens: us, and how many times faster than cuBLAS in bf16."""
    parts = []
    for result in results:
        parts += _noted([_product_table(linear_rows(result, False), PREFILL)], result)
    return "\n\n".join(parts)


def decode_table(results: Sequence[Result]) -> str:
    """Products of 1 and 16 tokens."""
    parts = []
    for result in results:
        parts += _noted([_product_table(linear_rows(result, True), DECODE)], result)
    return "\n\n".join(parts)


def static_table(results: Sequence[Result]) -> str:
    """Table of time that static scales save, with the kernel of the input, fused and not."""
    header = ["linear", "tokens", "static, fused", "static, unfused", "dynamic, fused"]
    header += ["dynamic, unfused", "saved, both unfused", "saved, both fused"]
    parts = []
    for result in results:
        rows = [_static_cells(row) for row in linear_rows(result, False)]
        parts += _noted([markdown_table(header, rows)], result)
    return "\n\n".join(parts)


def _static_cells(row: Result) -> list[str]:
    names = ("static MSQ rows", "static unfused", "dynamic fused", "dynamic unfused")
    times = [row["us"].get(f"chain {name}") for name in names]
    cells = [_title(row), f"{row['tokens']:,}"]
    cells += [f"{us:,.1f}" if isinstance(us, float) else "" for us in times]
    if not all(isinstance(us, float) for us in times):
        return [*cells, "", ""]
    fused, unfused, dynamic, dynamic_unfused = times
    saved = (1 - unfused / dynamic_unfused, 1 - fused / dynamic)
    return [*cells, *(f"{100 * share:+.1f} %" for share in saved)]


def layer_seconds(result: Result, tokens: int, label: str | None) -> float | None:
    """All linears of all layers with what makes their inputs, or None if one was not timed."""
    rows = [row for row in linear_rows(result, False) if row["tokens"] == tokens]
    times = [row["us"].get(label) for row in rows]
    if len(times) < 4 or not all(isinstance(us, float) for us in times):
        return None
    return LAYERS * sum(times) / 1e6


def paper_table(results: Sequence[Result]) -> str:
    """The paper's latencies, and ours where the same thing was timed."""
    parts = []
    for result in results:
        tokens = sorted({row["tokens"] for row in linear_rows(result, False)})
        titles = [f"ours, {result['device']}, {count:,} tokens" for count in tokens]
        title = (
            f"Linear layers of the language model in prefill, seconds (their Table 7, {PAPER_GPU}):"
        )
        cells = [_paper_linear(result, tokens, *row) for row in PAPER_LINEARS]
        parts += _noted([title, markdown_table(["", "paper", *titles], cells)], result)
    return "\n\n".join(parts)


def _with_ratio(value: float | None, base: float | None, form: str) -> str:
    if value is None:
        return ""
    ratio = f" ({base / value:.2f}x)" if base else ""
    return f"{value:{form}}{ratio}"


def _paper_linear(
    result: Result, tokens: Sequence[int], name: str, paper: float | None, label: str | None
) -> list[str]:
    base = PAPER_LINEARS[0]
    ours = (
        _with_ratio(
            layer_seconds(result, count, label), layer_seconds(result, count, base[2]), ".4f"
        )
        for count in tokens
    )
    return [name, _with_ratio(paper, base[1], ".3f"), *ours]


def model_table(results: Sequence[Result]) -> str:
    """Whole models: milliseconds of a prefill with a picture and of a decode step, times bf16."""
    return "\n\n".join(part for result in results for part in _model_parts(result))


def _model_parts(result: Result) -> list[str]:
    lengths = list(dict.fromkeys(p["tokens"] for row in result["rows"] for p in row["prefill"]))
    base = next(row for row in result["rows"] if row["recipe"] == "bf16")
    header = ["weights and activations", "modules fused", "weights, GB"]
    header += [f"prefill, {count:,} tokens, ms" for count in lengths]
    header += ["of it vision, ms", "decode step, ms"]
    table = markdown_table(header, [_model_cells(row, base, lengths) for row in result["rows"]])
    layers = "" if result["layers"] is None else f", {result['layers']} layers of each stack"
    said = f"{result['model']}{layers}; vision at the longest prompt; a decode step after "
    said += f"{result['context']:,} tokens under a CUDA graph"
    shown = (f"{side}² {their / ours:.2f}x" for side, their, ours in PAPER_WHOLE)
    paper = ", ".join(shown)
    paper = f"The paper's Table 3, the whole model by side of the picture: {paper}. "
    their_base, others = PAPER_DECODE
    shown = (f"{name} {their_base / ms:.2f}x" for name, ms in others)
    paper += f"Its Table 5, a decode step: {', '.join(shown)}."
    return [table, paper, f"*{said}; {source(result)}.*"]


def _model_cells(row: Result, base: Result, lengths: Sequence[int]) -> list[str]:
    fused = str(row["fused_modules"]) if row["fused"] else "none"
    cells = [row["recipe"], fused, f"{row['weight_bytes'] / 1e9:.2f}"]
    for count in lengths:
        cells.append(_with_ratio(_prefill_ms(row, count), _prefill_ms(base, count), ",.1f"))
    vision = next((p["vision_ms"] for p in reversed(row["prefill"])), None)
    cells.append(_with_ratio(vision, None, ",.1f"))
    return [*cells, _with_ratio(row.get("decode_ms"), base.get("decode_ms"), ".3f")]


def _prefill_ms(row: Result, tokens: int) -> float | None:
    return next((p["ms"] for p in row["prefill"] if p["tokens"] == tokens), None)


# {name of the table: (schema of its result files, function that renders them)}
RENDERERS = {
    "mquant-prefill": ("duotone.mquant.speed/1", prefill_table),
    "mquant-static": ("duotone.mquant.speed/1", static_table),
    "mquant-decode": ("duotone.mquant.speed/1", decode_table),
    "mquant-model": ("duotone.mquant.model/1", model_table),
    "mquant-paper": ("duotone.mquant.speed/1", paper_table),
}
