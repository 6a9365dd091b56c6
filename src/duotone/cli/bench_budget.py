"""`duotone bench generate --budget`: the largest batch that fits, and its tokens per second."""

import json
from collections.abc import Iterable
from pathlib import Path
from time import monotonic
from typing import Any

import typer

from .bench_subject import prompts, subject
from .card import parse_bytes
from .common import say

# Visual tokens and generated ones of CalibQuant's Tables 5 and 6.
VISUAL_TOKENS, NEW_TOKENS = 3328, 500


def run(
    model: str,
    budgets: str,
    rows: list[str] | None,
    visual: int | None,
    new: int | None,
    minutes: float | None,
    out: Path | None,
    device: Any,
) -> list[dict[str, Any]]:
    """Measure all rows in all budgets; results of each budget, rows of earlier runs included.

    Rows come first, budgets second: weights are quantized once. A file of each budget is written
    after each row. Errors: ValueError for bad input, before any work.
    """
    from duotone.bench.generate import Bench, Load
    from duotone.bench.generate_budget import Answers, BudgetBench
    from duotone.bench.generate_rows import budget_rows, parse_rows

    sizes = [parse_bytes(one) for one in budgets.split(",")]
    answers = Answers(visual or VISUAL_TOKENS, new=new or NEW_TOKENS)
    asked = parse_rows(rows or [])
    load = Load(1, answers.visual + answers.prompt, answers.new, calls=2)
    with subject(model, device, load) as given:
        bench = Bench(given, load)
        one = prompts(model, given.model, answers.visual)
        asked = asked or parse_rows(budget_rows(bench.takes_images))
        bench.check(asked)
        budget_bench = BudgetBench(bench, one, answers)
        files = [_File(out, budget_bench.header(size)) for size in sizes]
        begin = monotonic()
        for row in asked:
            for file in files:
                if row.name in file.done:
                    continue
                if minutes is not None and monotonic() - begin > 60 * minutes:
                    say("the time is over (--minutes); the same command goes on from here")
                    return [file.result for file in files]
                found = budget_bench.row(row, file.result["budget_bytes"])
                file.add(found)
                typer.echo(line(file.result["budget_bytes"], found), err=True)
    return [file.result for file in files]


class _File:
    """The result of one budget, and its file in a folder, or none.

    A row that goes on with a file of another commit has its own commit and date.
    Errors: ValueError for a file of another device or other tokens.
    """

    def __init__(self, folder: Path | None, header: dict[str, Any]) -> None:
        self.result, self.path = header, None
        self.stamp = {name: header[name] for name in ("created", "commit")}
        if folder is None:
            return
        model = Path(header["model"]).name.removesuffix(".json")
        name = f"{model}-n{header['visual_tokens']}"
        self.path = folder / f"{name}-{header['budget_bytes'] / 1e9:g}GB.json"
        if self.path.exists():
            self.result = _continued(self.path, header)

    @property
    def done(self) -> set[str]:
        """Names of rows that are there."""
        return {row["row"] for row in self.result["rows"]}

    def add(self, row: dict[str, Any]) -> None:
        """Add a row and write the file: a run that is cut off keeps it."""
        is_later = self.stamp["commit"] != self.result["commit"]
        self.result["rows"].append({**row, **self.stamp} if is_later else row)
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")


def _continued(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    """The result of a file, less rows that could not run."""
    found = json.loads(path.read_text(encoding="utf-8"))
    for name in header.keys() - {"rows", "method", "created", "commit", "versions"}:
        if found.get(name) != header[name]:
            raise ValueError(
                f"rows of one file have one {name}: {str(path)!r} has {found.get(name)!r}, these "
                f"would have {header[name]!r}. Give another folder as --out."
            )
    rows = [row for row in found["rows"] if "reason" not in row]
    return {**found, "method": header["method"], "rows": rows}


def line(budget_bytes: int, row: dict[str, Any]) -> str:
    """Line of one row in one budget."""
    begin = f"{budget_bytes / 1e9:g} GB, {row['row']}"
    if "reason" in row:
        return f"{begin:34s} {row['reason']}"
    if not row["batch"]:
        return f"{begin:34s} not one sequence fits"
    parts = [
        f"{begin:34s} batch {row['batch']} (fits {row['largest_batch']})",
        f"{row['step_ms']:.2f} ms per step",
        f"{row['tokens_per_s']:,.0f} tokens/s, {row['answer_tokens_per_s']:,.0f} with the prompts",
        f"{row['read_s']:.2f} s per prompt",
    ]
    if row["peak_bytes"] is not None:
        parts.append(f"peak {row['peak_bytes'] / 1e9:.2f} GB")
    return "; ".join([", ".join(parts), f"{row['wall_s']:.0f} s", *row["notes"]])


def failed(results: Iterable[dict[str, Any]]) -> bool:
    """True where some row of some budget could not run."""
    return any(row.get("failed") for result in results for row in result["rows"])
