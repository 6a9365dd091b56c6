"""Tables of `answers.py`: schema duotone.serve-answers/1."""

from collections.abc import Sequence

from benchmarks.serve.compared import DENSE, Side
from duotone.report.markdown import Result, markdown_table, source

HEADER = (
    "device",
    "task",
    "question",
    "score",
    "vLLM, 16 bit",
    "vLLM, few bits",
    "difference, 95 %",
    "answers as 16 bit's",
    "answers as in memory",
    "tokens as in memory",
)


def answers_table(results: Sequence[Result]) -> str:
    """Scores and equal answers, a line per device, task and time of the question."""
    lines = [
        _line(result, row, later)
        for result in results
        for row in result["rows"]
        for later in (False, True)
    ]
    return f"{markdown_table(HEADER, lines)}\n\n*{source(*results)}.*"


def _line(result: Result, row: Result, later: bool) -> list[str]:
    few, dense = (Side(True, later, width) for width in (result["row"], DENSE))
    pairs = {(x["of"], x["to"]): x for x in row["pairs"]}
    beside = pairs[str(few), str(dense)]
    in_memory = pairs[str(few), str(few._replace(served=False))]
    change = beside["difference"]
    return [
        f"{result['device']}, {result['dtype']}, {result['row']}",
        row["task"],
        "after the pictures" if later else "with them",
        row["headline"],
        *(f"{row['scores'][str(side)]['value']:.3f}" for side in (dense, few)),
        f"{change['value']:+.3f} ({change['low']:+.3f} to {change['high']:+.3f})",
        f"{beside['same_answers']} of {row['samples']}",
        f"{in_memory['same_answers']} of {row['samples']}",
        f"{in_memory['same_tokens']:.1%}",
    ]


RENDERERS = {"serve-answers": ("duotone.serve-answers/1", answers_table)}
