"""Tables of `steps.py`: schema duotone.serve-steps/1."""

from collections.abc import Sequence

from benchmarks.serve.answers_tables import RENDERERS as ANSWERS
from duotone.report.markdown import Result, markdown_table

BASE = "bf16"


def steps_table(results: Sequence[Result]) -> str:
    """A table per device and way to compile: steps and prompts per cache dtype beside 16 bit."""
    kinds = sorted({_kind(result) for result in results})
    return "\n\n".join(_table([one for one in results if _kind(one) == kind]) for kind in kinds)


def _kind(result: Result) -> tuple[str, bool]:
    return result["device"], not result["compiles"]


def _table(results: Sequence[Result]) -> str:
    names = sorted({result["row"] for result in results}, key=lambda name: (name != BASE, name))
    lines = _lines(results)
    header = ["shape", "requests", "prompt"]
    header += [f"{name}, ms a step" for name in names]
    header += [f"{name}, new tokens/s" for name in names]
    header += [f"{name}, prompt tokens/s" for name in names]
    cells = [
        [shape, str(batch), f"{tokens:,}"]
        + [_step(found, name) for name in names]
        + [_new(found.get(name)) for name in names]
        + [_prompts(found.get(name)) for name in names]
        for (shape, batch, tokens), found in sorted(lines.items())
    ]
    last = results[-1]
    versions = f"vLLM {last['versions']['vllm']}, torch {last['versions']['torch']}"
    compiled = "with" if last["compiles"] else "without"
    said = f"{last['device']}, {versions}, {compiled} torch.compile"
    return f"{markdown_table(header, cells)}\n\n*{said}.*"


def _lines(results: Sequence[Result]) -> dict[tuple[str, int, int], dict[str, Result]]:
    """{(shape, requests, tokens of a prompt): {row: its numbers}}."""
    lines: dict[tuple[str, int, int], dict[str, Result]] = {}
    for result in results:
        for row in result["rows"]:
            of_line = lines.setdefault((result["shape"], row["batch"], row["tokens"]), {})
            of_line[result["row"]] = row
    return lines


def _step(found: dict[str, Result], name: str) -> str:
    """Milliseconds of a step, and how many times faster than 16 bit it is."""
    if name not in found:
        return ""
    ms = found[name]["step_ms"]
    if name == BASE or BASE not in found:
        return f"{ms:.2f}"
    return f"{ms:.2f} ({found[BASE]['step_ms'] / ms:.2f} x)"


def _new(row: Result | None) -> str:
    return "" if row is None else f"{row['batch'] / row['step_ms'] * 1e3:,.0f}"


def _prompts(row: Result | None) -> str:
    return "" if row is None else f"{row['batch'] * row['tokens'] / row['prompts_s']:,.0f}"


RENDERERS = {
    **ANSWERS,
    "serve-steps": ("duotone.serve-steps/1", steps_table),
}
