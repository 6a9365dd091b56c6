"""Tables of `benchmarks/scheme_table.py` (schemas duotone.schemes/1 and duotone.text/1)."""

from collections.abc import Sequence

from duotone.report.markdown import (
    EIGHT_BITS,
    Result,
    has_8_bit_window,
    markdown_table,
    source,
    with_16_bit_numbers,
    with_interval,
)

from .quality import provenance, quality_cell, title, visual_bits


def _kilobytes(scheme: Result, samples: int) -> str:
    return f"{scheme['memory']['total_bytes'] / samples / 1000:,.0f}"


def scheme_table(results: Sequence[Result]) -> str:
    """Schemes of each task: nominal and true bits, bytes, score and divergence from 16 bit."""
    tables = []
    header = ["scheme", "nominal bits", "true bits, pictures", "true bits, whole cache"]
    for result in results:
        rows = []
        for label, scheme in result["schemes"].items():
            memory, kl = scheme["memory"], scheme["metrics"].get("kl")
            cells = [f"{memory['nominal_bits']:.2f}"]
            # A stream has no bits of pictures alone.
            cells.append(visual_bits(scheme) if memory.get("visual_bits_per_element") else "")
            cells += [f"{memory['bits_per_element']:.2f}", _kilobytes(scheme, result["samples"])]
            cells.append(quality_cell(result, label, result["headline"]))
            rows.append([_row_name(label, scheme), *cells, with_interval(kl, 4) if kl else ""])
        heading = f"{title(result)}, {result['samples']} samples, windows of {result['window']}:"
        columns = [*header, "KB per sequence", result["headline"], "KL (nats)"]
        tables += [heading, markdown_table(columns, rows)]
    legend = ["Bold: the paired 95 % interval of the difference from 16 bit contains zero."]
    legend += [EIGHT_BITS_NOTE] if f"({EIGHT_BITS})" in "".join(tables) else []
    return "\n\n".join([*tables, *legend, provenance(results)])


# Of rows of schemes that once had windows in 8-bit floats.
EIGHT_BITS_NOTE = (
    f"Rows marked *{EIGHT_BITS}* are of a window of 64 tokens in 8-bit floats, as `duotone-stream` "
    "and `duotone-mixed` had when they were made; both have 96 tokens in 16 bit."
)


def _row_name(label: str, scheme: Result) -> str:
    """A row's label, and what it was measured with where the label does not say so."""
    spec = scheme.get("configuration", {}).get("spec")
    return f"{label} ({EIGHT_BITS})" if has_8_bit_window(spec) and "fp8" not in label else label


def text_table(results: Sequence[Result]) -> str:
    """Schemes of each text model: true and nominal bits, perplexity and its change."""
    tables = []
    for result in results:
        rows = []
        for label, scheme in result["schemes"].items():
            scheme = scheme | {"memory": with_16_bit_numbers(scheme, result["dtype"])}
            memory, change = scheme["memory"], scheme["difference"]
            bits = (f"{memory[name]:.2f}" for name in ("nominal_bits", "bits_per_element"))
            cells = (with_interval(scheme["perplexity"]), with_interval(change))
            rows.append([label, *bits, _kilobytes(scheme, result["documents"]), *cells])
        header = ["scheme", "nominal bits", "true bits", "KB per document"]
        header += ["perplexity", "minus unquantized"]
        title = (
            f"{result['model']}, {result['dtype']}, {result['documents']} documents of up to "
            f"{result['context']} tokens, {result['window']} recent tokens in every window; bytes "
            "of unquantized numbers are those of 16 bit:"
        )
        note = f"*± half the 95 % bootstrap interval; {source(result)}.*"
        tables += [title, markdown_table(header, rows), note]
    return "\n\n".join(tables)
