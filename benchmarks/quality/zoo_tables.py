"""Tables of `choose.py`: schema duotone.zoo-choice/1."""

from collections.abc import Sequence
from typing import Any

from duotone.report.markdown import Result, markdown_table, source

OURS = "held-out choice"


def order_table(results: Sequence[Result]) -> str:
    """Schemes by models without stress: rank, KL and true bits; a table per width."""
    result = results[-1]
    tables = [_width_table(width) for width in result["widths"]]
    legend = (
        "Cells: rank by KL; KL in nats ± half the 95 % interval over sequences; true bits of "
        f"visual tokens in brackets. *{OURS}*: the candidate that all other models choose. Bold: "
        "no row is better beyond the paired interval."
    )
    return "\n\n".join([*tables, legend, _footer(result)])


def order_before(results: Sequence[Result]) -> str:
    """`order_table` of the models as they were first trained."""
    return order_table(results[:1])


def stress_table(results: Sequence[Result]) -> str:
    """KL of the held-out choice over that of the best plain code, by width, model and stress."""
    result = results[-1]
    lines = {
        (width["bits"], case["model"], case["stress"]): _ratio_cell(case)
        for width in result["widths"]
        for case in width["cases"]
    }
    stresses = list(dict.fromkeys(stress for _, _, stress in lines))
    heads = list(dict.fromkeys((bits, model) for bits, model, _ in lines))
    rows = [
        [str(bits), model, *(lines.get((bits, model, stress), "") for stress in stresses)]
        for bits, model in heads
    ]
    table = markdown_table(["bits", "model left out", *stresses], rows)
    return f"{table}\n\n{_footer(result)}"


def _width_table(width: Result) -> str:
    cases = [case for case in width["cases"] if case["stress"] == "none"]
    cells = [_cells(case) for case in cases]
    names = sorted({name for column in cells for name in column}, key=lambda n: (n != OURS, n))
    names.sort(key=lambda name: sum(column[name][0] for column in cells if name in column))
    rows = [
        [name, *(column[name][1] if name in column else "" for column in cells)] for name in names
    ]
    head = f"{width['bits']} bit, chosen: `{width['preset']}`"
    return markdown_table([head, *(case["model"] for case in cases)], rows)


def _cells(case: Result) -> dict[str, tuple[int, str]]:
    """{row: (rank, cell)} of one model."""
    return {row["row"]: (rank, _cell(rank, row)) for rank, row in enumerate(case["rows"], start=1)}


def _cell(rank: int, row: dict[str, Any]) -> str:
    kl = f"{rank}: {row['kl']:.2g} ± {row['kl_interval']:.1g}"
    return f"{f'**{kl}**' if row['as_the_least'] else kl} ({row['visual_bits']:.2f})"


def _ratio_cell(case: Result) -> str:
    kl = {row["row"]: row["kl"] for row in case["rows"]}
    best = case["best_plain"]
    return f"{kl[OURS] / kl[best]:.2f} of {best.rpartition('@')[0]}"


def _footer(result: Result) -> str:
    """Sequences, provenance of all files, and candidates without numbers in some case."""
    lost = {row["row"] for width in result["widths"] for row in width.get("dropped", ())}
    without = f"; without numbers in some case: {', '.join(sorted(lost))}" if lost else ""
    where = source(*result.get("sources", [result]))
    return f"*{_sequences(result)}; {where}{without}.*"


def _sequences(result: Result) -> str:
    counts = sorted({case["sequences"] for width in result["widths"] for case in width["cases"]})
    return f"{' to '.join(map(str, dict.fromkeys([counts[0], counts[-1]])))} held-out sequences"


RENDERERS = {
    "zoo-order": ("duotone.zoo-choice/1", order_table),
    "zoo-order-before": ("duotone.zoo-choice/1", order_before),
    "zoo-stress": ("duotone.zoo-choice/1", stress_table),
}
