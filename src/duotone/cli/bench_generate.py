"""`duotone bench generate`: `model.generate` with and without duotone, row by row."""

import json
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer

from . import bench_budget
from .bench_subject import subject
from .common import JsonOption, print_json, say, user_errors

# A row failed; all others are in the output.
FAILED = 1
TOKENS, NEW_TOKENS, CALLS = 3428, 100, 3
NO_GPU = "without a GPU there are no CUDA graphs and no peak memory"


@user_errors
def command(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="A shape (internvl3-8b, internvl-llama3-8b, internvl2.5-8b, internvl2.5-26b, "
            "tiny) or a config.json, with random weights; or a folder or hub name.",
        ),
    ] = "internvl3-8b",
    row: Annotated[
        list[str] | None,
        typer.Option(
            help='A row; repeatable: plain, "plain, cuDNN off", "StaticCache, compiled", '
            'or SCHEME@BITS or a spec\'s .json file, with ", no graphs" after it or not; '
            'each with ", RECIPE" after it on quantized weights, e.g. "duotone@1, rtn-w4a8". '
            "calibrated@1 and 'calibrated, text@2': as duotone calibrate makes them, with random "
            "bases.",
            show_default="the whole table",
        ),
    ] = None,
    spec: Annotated[
        list[str] | None,
        typer.Option(
            help="A scheme or spec file as two rows, with graphs and without; repeatable. Beside "
            "plain where there is no --row.",
            show_default="none",
        ),
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences.", show_default="1")] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Memory for caches and activations beside the weights, e.g. 30GB or 5GB,10GB: "
            "rows have the largest batch that fits. --tokens are then visual ones, before 128 of "
            "text; --out is a folder, whose files are continued.",
            show_default="none",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of the longest prompt.", show_default="3428; with --budget 3328"
        ),
    ] = None,
    picture_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a picture, where --model is a config.json. Short ones take longer.",
            show_default="one picture",
        ),
    ] = None,
    new: Annotated[
        int | None,
        typer.Option(
            "--new-tokens",
            "--new",
            min=1,
            help="Generated tokens of a call.",
            show_default="100; with --budget 500",
        ),
    ] = None,
    padded: Annotated[
        bool, typer.Option("--padded", help="Prompts of different lengths, padded on the left.")
    ] = False,
    calls: Annotated[
        int | None,
        typer.Option(min=2, help="Calls of a row; the last one counts.", show_default="3"),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0, help="Of a row, then it is cut (beyond its second call).", show_default="none"
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Begin no row after so many minutes.", show_default="none"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New JSON file, written after each row.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try it out.")] = "cuda",
    json_output: JsonOption = False,
) -> None:
    """Measure what a user of `model.generate` gets: plain, and inside `duotone.enable`.

    Time to first token, ms per token and memory. Random weights of a real
    shape take the time of trained ones. Exit code 1: some row failed.

    [bold]Examples[/bold]

      duotone bench generate --out results/generate/h200-b1.json

      duotone bench generate --batch 32 --tokens 8292 --row plain --row duotone@1 --calls 2

      duotone bench generate --model path/to/model --spec duotone@1 --spec mine.json --seconds 30

      duotone bench generate --model internvl2.5-8b --budget 10GB,30GB --out results/budget
    """
    from duotone.bench.generate import Bench, Load
    from duotone.bench.generate_rows import PLAIN, default_rows, parse_rows, rows_of_spec
    from duotone.loading import usable_device

    used = usable_device(device)
    names = row or ([PLAIN] if spec else [])
    names = [*names, *(name for each in spec or [] for name in rows_of_spec(each))]
    if budget is not None:
        given = {"batch": batch, "calls": calls, "seconds": seconds, "padded": padded or None}
        _check_alone(**given, picture_tokens=picture_tokens)
        where = (out, used)
        _budgets(model, budget, names, tokens, new, minutes, *where, json_output=json_output)
        return
    if out is not None and out.exists():
        raise ValueError(f"--out must be a new file, got the existing {str(out)!r}")
    sizes = batch or 1, tokens or TOKENS, new or NEW_TOKENS
    load = Load(*sizes, padded, calls or CALLS, seconds, picture_tokens)
    asked = parse_rows(names)
    with subject(model, used, load) as given:
        bench = Bench(given, load)
        asked = asked or parse_rows(default_rows(bench.takes_images))
        bench.check(asked)
        result = _measured(bench, asked, minutes, out, silent=json_output)
    if json_output:
        print_json(result)
    if any(found.get("failed") for found in result["rows"]):
        raise typer.Exit(FAILED)


def _measured(
    bench: Any, asked: list[Any], minutes: float | None, out: Path | None, silent: bool
) -> dict[str, Any]:
    """The result of all rows, which is written after each."""
    from duotone.bench.generate import header

    result, begin = header(bench), monotonic()
    if bench.device.type != "cuda":
        say(NO_GPU)
    for one in asked:
        late = minutes is not None and monotonic() - begin > 60 * minutes
        result["rows"].append(_late(one.name) if late else bench.row(one))
        if not silent:
            typer.echo(line(result["rows"][-1]))
        if out is not None:
            _write(out, result)
    return result


def _check_alone(**given: Any) -> None:
    """Raise ValueError for options that a budget decides."""
    if named := [f"--{n.replace('_', '-')}" for n, value in given.items() if value is not None]:
        raise ValueError(
            f"--budget finds the batch and times one call of whole prompts; got {named} as well. "
            "Leave them out."
        )


def _budgets(*given: Any, json_output: bool) -> None:
    results = bench_budget.run(*given)
    if json_output:
        print_json(results)
    if bench_budget.failed(results):
        raise typer.Exit(FAILED)


def _late(name: str) -> dict[str, Any]:
    return {"row": name, "failed": False, "reason": "the time was over (--minutes)"}


def _write(out: Path, result: dict[str, Any]) -> None:
    """Write the rows so far: a run that is cut off keeps them."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def line(row: dict[str, Any]) -> str:
    """Line of one row."""
    if "reason" in row:
        return f"{row['row']:26s} {row['reason']}"
    parts = [
        f"{row['row']:26s} first token {row['ttft_ms']:.0f} ms (first call "
        f"{row['first_ttft_ms']:.0f})",
        f"{row['ms_per_token']:.2f} ms per token (first call {row['first_ms_per_token']:.2f}, "
        f"longest {row['longest_ms']:.1f})",
        f"first step {row['first_step_ms']:.0f} ms (first call {row['first_call_step_ms']:.0f})",
        f"{row['tokens_per_s']:,.0f} tokens/s",
    ]
    if "question_ttft_ms" in row:
        parts.insert(1, f"a later question {row['question_ttft_ms']:.0f} ms")
    if row["peak_bytes"] is not None:
        parts.append(f"peak {row['peak_bytes'] / 1e9:.2f} GB")
    parts.append(f"cache {row['cache_bytes'] / 1e6:,.1f} MB")
    return "; ".join([", ".join(parts), *row["notes"]])


if __name__ == "__main__":
    typer.run(command)
