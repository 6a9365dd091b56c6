"""Results of benchmarks/transform_*.py as Markdown."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from duotone.report.markdown import Result, markdown_table, source, with_interval

KL_DIGITS = 5


def widths_table(results: Sequence[Result]) -> str:
    """Per task: true bits of the pictures, nominal bits, score and KL, held out."""
    tables = []
    for result in results:
        headline = result["headline"]
        rows = [_width_row(label, scheme, headline) for label, scheme in result["schemes"].items()]
        title = f"{result['task']}, {result['samples']} samples:"
        header = ["spec", "code bits", "true bits, pictures", headline, "KL (nats)"]
        note = f"*± half the 95 % bootstrap interval; {source(result)}.*"
        tables += [title, markdown_table(header, rows), note]
    return "\n\n".join(tables)


def _width_row(label: str, scheme: Result, headline: str) -> list[str]:
    memory, metrics = scheme["memory"], scheme["metrics"]
    true_bits = memory.get("visual_bits_per_element", memory["bits_per_element"])
    kl = with_interval(metrics["kl"], KL_DIGITS) if "kl" in metrics else ""
    return [
        label,
        f"{memory['nominal_bits']:.2f}",
        f"{true_bits:.2f}",
        with_interval(metrics[headline]),
        kl,
    ]


def _measured(rows: Mapping[str, Result], first: str) -> str:
    """Rows of `tune.heldout.entry`: bits, KL of every task, and its geometric mean."""
    tasks = list(next(iter(rows.values()))["tasks"])
    header = [first, "true bits", *(f"{task}, KL (nats)" for task in tasks)]
    header += ["geometric mean"] if len(tasks) > 1 else []
    cells = []
    for label, row in rows.items():
        line = [label, f"{row['bits']:.2f}"]
        line += [with_interval(row["tasks"][task]["kl"], KL_DIGITS) for task in tasks]
        cells.append([*line, *([f"{row['kl']:.5f}"] if len(tasks) > 1 else [])])
    return markdown_table(header, cells)


def _note(result: Result) -> str:
    return (
        f"*{result['calibration_samples_per_task']} calibration samples and "
        f"{result['heldout_samples_per_task']} held-out ones per task, question asked later; "
        f"± half the 95 % bootstrap interval; {source(result)}.*"
    )


def choices_table(results: Sequence[Result]) -> str:
    """Every choice of a calibration, one at a time from the preset's."""
    parts = ((_measured(result["rows"], "spec"), _note(result)) for result in results)
    return _joined(parts)


def robustness_table(results: Sequence[Result]) -> str:
    """Calibrated on little or on other data, and spans of other lengths."""
    parts = []
    for result in results:
        for question, rows in result["rows"].items():
            if rows:
                parts += [f"**{question.capitalize()}**", _measured(rows, "spec")]
        parts.append(_note(result))
    return "\n\n".join(parts)


def transform_text_table(results: Sequence[Result]) -> str:
    """Text models: bits of the stream, KL, perplexity and its change."""
    header = ["scheme", "code bits", "true bits, packed", "true bits, whole cache", "KL (nats)"]
    header += ["perplexity", "minus 16 bit"]
    parts = []
    for result in results:
        rows = [_text_row(label, scheme) for label, scheme in result["schemes"].items()]
        title = (
            f"{result['model']}, {result['layers']} layers, heads of {result['head_dim']} "
            f"channels, {result['documents']} documents of up to {result['context']} tokens, "
            f"{result['window']} recent tokens in every window, "
            f"{result['calibration_documents']} other documents to calibrate on:"
        )
        note = (
            f"*Bits of one stream of {result['context']} tokens; {result['dtype']}; "
            f"± half the 95 % bootstrap interval; {source(result)}.*"
        )
        parts += [title, markdown_table(header, rows), note]
    return "\n\n".join(parts)


def _text_row(label: str, scheme: Result) -> list[str]:
    perplexity = with_interval(scheme["perplexity"])
    if "kl" not in scheme:
        return [label, "16.00", "", "16.00", "", perplexity, ""]
    bits = [f"{scheme[name]:.2f}" for name in ("code_bits", "packed_bits", "bits")]
    kl, change = with_interval(scheme["kl"], 4), with_interval(scheme["difference"])
    return [label, *bits, kl, perplexity, change]


def cost_table(results: Sequence[Result]) -> str:
    """Microseconds of bases in a decode step; seconds and memory of a calibration."""
    parts = []
    for result in sorted(results, key=lambda result: "calibration" in result):
        parts += [*_decode_cost(result), *_calibration_cost(result), f"*{source(result)}.*"]
    return "\n\n".join(parts)


def _decode_cost(result: Result) -> list[str]:
    if "decode" not in result:
        return []
    decode = result["decode"]
    rows = [_cost_row(name, row) for name, row in decode.items() if isinstance(row, dict)]
    header = ["16-bit tokens beside", "without bases, us", "with", "extra", "share of 16 bit"]
    return [
        f"Decode at (32, 32, 8, 8192); {decode['best_16_bit']} takes "
        f"{decode['best_16_bit_us']:.0f} us:",
        markdown_table(header, rows),
    ]


def _calibration_cost(result: Result) -> list[str]:
    if "calibration" not in result:
        return []
    made = result["calibration"]
    return [
        f"Calibration of {made['layers']} layers of an 8B model on {made['sequences']} "
        f"sequences of {made['visual_tokens_per_sequence']} visual tokens: "
        f"{made['seconds']:.0f} s, {made['bytes_above_model'] / 2**30:.1f} GiB above the model."
    ]


def _cost_row(name: str, row: Mapping[str, Any]) -> list[str]:
    share = f"{100 * row['extra_share_of_16_bit']:.1f} %"
    times = [f"{row[key]:.1f}" for key in ("plain", "bases", "extra_us")]
    return [name.removeprefix("window "), *times, share]


def _joined(parts: Iterable[Sequence[str]]) -> str:
    return "\n\n".join(text for part in parts for text in part)
