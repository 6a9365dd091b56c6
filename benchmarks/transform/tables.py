"""Tables of `table.py`: schema duotone.transform.widths/1."""

from collections.abc import Sequence

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
    kl = with_interval(metrics["kl"], KL_DIGITS) if "kl" in metrics else ""
    return [
        label,
        f"{memory['nominal_bits']:.2f}",
        _true_bits(scheme),
        with_interval(metrics[headline]),
        kl,
    ]


def _true_bits(scheme: Result) -> str:
    memory = scheme["memory"]
    return f"{memory.get('visual_bits_per_element', memory['bits_per_element']):.2f}"


def widths_summary(results: Sequence[Result]) -> str:
    """True bits of the pictures, and every task's KL, of specs that all tasks have."""
    labels = [
        label
        for label, scheme in results[0]["schemes"].items()
        if "kl" in scheme["metrics"] and all(label in result["schemes"] for result in results)
    ]
    rows = []
    for label in labels:
        schemes = [result["schemes"][label] for result in results]
        kls = (with_interval(scheme["metrics"]["kl"], KL_DIGITS) for scheme in schemes)
        rows.append([label, _true_bits(schemes[0]), *kls])
    header = ["spec", "true bits, pictures", *(f"{r['task']}, KL (nats)" for r in results)]
    samples = " / ".join(str(result["samples"]) for result in results)
    note = f"*{samples} samples; ± half the 95 % bootstrap interval; {source(*results)}.*"
    return "\n\n".join([markdown_table(header, rows), note])


# {name of the table: (schema of its result files, function that renders them)}
RENDERERS = {
    "transform-summary": ("duotone.transform.widths/1", widths_summary),
    "transform-widths": ("duotone.transform.widths/1", widths_table),
}
