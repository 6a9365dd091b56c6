"""`duotone bench throughput`: the papers' experiment under a memory budget."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import JsonOption, print_json, show_paths, user_errors

DEFAULT_MODEL = "internvl2.5-8b"


def _numbers(text: str, name: str) -> list[float]:
    """'5,30' -> [5, 30]."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) <= 0:
        raise ValueError(f"{name} must be positive numbers with commas, got {text!r}; e.g. 5,30")
    return found


@user_errors
def command(
    model: Annotated[
        str, typer.Option("--model", "-m", help="internvl2.5-8b or internvl2.5-26b (shapes).")
    ] = DEFAULT_MODEL,
    visual_tokens: Annotated[
        str, typer.Option("--n", help="Visual tokens per sequence, with commas.")
    ] = "3328,8192",
    budget: Annotated[
        str, typer.Option(help="GB (1e9) for caches and activations, with commas.")
    ] = "5,10,15,20,25,30",
    row: Annotated[
        list[str] | None,
        typer.Option(help="A row; repeatable. Default: 16 bit and the visual schemes."),
    ] = None,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin nothing after so many minutes.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder of the result files.")] = Path(
        "results/throughput"
    ),
    prompt: Annotated[int, typer.Option(min=1, help="Text tokens of a prompt.")] = 128,
    new: Annotated[int, typer.Option(min=1, help="Generated tokens.")] = 500,
    fuse: Annotated[
        bool, typer.Option(help="Compile the model's elementwise operations (both sides).")
    ] = True,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try it out.")] = "cuda",
    json_output: JsonOption = False,
) -> None:
    """Measure the largest batch and the decode throughput that a memory budget allows.

    Random weights of the real shape, 16 bit and few bits through the same captured decode step,
    inside a limit that the allocator enforces. One new file per measurement. What has a file or
    a line of MODEL.jsonl is left out, so an interrupted run goes on where it stopped.

    [bold]Examples[/bold]

      duotone bench throughput --budget 5,30 --minutes 5

      duotone bench throughput --model internvl2.5-26b --n 3328 --row 16-bit --row "1-bit visual"
    """
    from duotone.bench.throughput import Configuration
    from duotone.bench.throughput_rows import MAIN_ROWS, ROWS
    from duotone.planning.shapes import SHAPES

    if model not in SHAPES:
        raise ValueError(f"--model must be one of {sorted(SHAPES)}, got {model!r}")
    rows = row or list(MAIN_ROWS)
    unknown = [name for name in rows if name not in ROWS]
    if unknown:
        raise ValueError(f"--row must be of {list(ROWS)}, got {unknown}")
    tokens = [int(n) for n in _numbers(visual_tokens, "--n")]
    budgets = [round(gb * 1e9) for gb in _numbers(budget, "--budget")]
    wanted = [
        Configuration(name, n, bytes_, prompt, new)
        for n in tokens
        for bytes_ in budgets
        for name in rows
    ]
    results = _run(SHAPES[model], wanted, out, minutes, device, fuse, json_output)
    if json_output:
        print_json(results)


def _say_paths(shape: Any, rows: list[str], device: Any) -> None:
    """Print the implementation per kind of tokens of each row to stderr; nothing for a CPU."""
    from duotone.bench.throughput_rows import ROWS
    from duotone.planning.memory import attention_paths

    for name in dict.fromkeys(rows) if device.type == "cuda" else ():
        row = ROWS[name]
        if row.cache is not None and row.library is None:
            typer.echo(f"{name}:", err=True)
            show_paths(attention_paths(shape.facts, row.cache, device), err=True)


def _run(
    shape: Any,
    wanted: list[Any],
    out: Path,
    minutes: float | None,
    device: str,
    fuse: bool,
    quiet: bool,
) -> list[dict[str, Any]]:
    import torch

    from duotone.bench.throughput import Bench, merged, run

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU and a CUDA build of torch; got neither")
    done = merged(out, shape.name)
    left = [at for at in wanted if at not in done and not at.path(out, shape.name).exists()]
    if not left:
        typer.echo(f"all {len(wanted)} measurements are in {out} already", err=True)
        return []
    _say_paths(shape, [at.row for at in left], torch.device(device))
    longest = max(at.load.tokens for at in wanted)
    bench = Bench(shape, torch.device(device), longest, fuse=fuse)
    results = []
    for at, result in run(bench, wanted, out, minutes):
        if result is not None:
            results.append(result)
            if not quiet:
                typer.echo(line(at, result))
    missing = len(left) - len(results)
    if missing:
        typer.echo(f"{missing} of {len(wanted)} measurements are left; run it again", err=True)
    return results


def line(at: Any, result: dict[str, Any]) -> str:
    """Line of one result."""
    head = f"n={at.visual} {at.budget_bytes / 1e9:g} GB {at.row:26s}"
    if not result["batch"]:
        return f"{head} no sequence fits ({result['wall_s']:.0f} s)"
    return f"{head} {_batch(result)}, {_step(result)}, {_speed(result)}"


def _batch(result: dict[str, Any]) -> str:
    guess = result.get("predicted")
    return f"batch {result['batch']:4d}" + (f" (predicted {guess['max_batch']})" if guess else "")


def _step(result: dict[str, Any]) -> str:
    """A step's time; other libraries' rows have neither prediction nor roofline."""
    names = {
        "predicted": "predicted_step_s",
        "roofline": "roofline_s",
        "without attention": "step_without_attention_s",
    }
    parts = [f"{name} {1e3 * result[at]:.2f}" for name, at in names.items() if at in result]
    return f"step {1e3 * result['step_s']:.2f} ms ({', '.join(parts)})"


def _speed(result: dict[str, Any]) -> str:
    return (
        f"{result['decode_tokens_per_s']:,.0f} tokens/s, prefill "
        f"{result['prefill_s_per_sequence']:.3f} s, {result['attention']} "
        f"({result['wall_s']:.0f} s)"
    )


if __name__ == "__main__":
    typer.run(command)
