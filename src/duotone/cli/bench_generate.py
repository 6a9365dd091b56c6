"""`duotone bench generate`: `model.generate` with and without duotone, row by row."""

from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer

from .common import JsonOption, load_model, print_json, user_errors


@user_errors
def command(
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="A shape (internvl3-8b, internvl-llama3-8b, tiny: random weights), or a folder or "
            "hub name.",
        ),
    ] = "internvl3-8b",
    row: Annotated[
        list[str] | None,
        typer.Option(
            help='A row; repeatable: plain, "plain, cuDNN off", "StaticCache, compiled", quanto@4, '
            'hqq@4, or SCHEME@BITS, also as "SCHEME@BITS, no graphs". Default: plain and schemes.',
        ),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Sequences.")] = 1,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of the longest prompt.")] = 3428,
    new: Annotated[int, typer.Option(min=1, help="Generated tokens of a call.")] = 100,
    recipe: Annotated[
        str | None,
        typer.Option(help="Quantize the weights first, e.g. rtn-w4a8 (duotone quantize)."),
    ] = None,
    calls: Annotated[int, typer.Option(min=2, help="Calls of a row; the last one counts.")] = 3,
    padded: Annotated[bool, typer.Option(help="Prompts of different lengths.")] = False,
    minutes: Annotated[
        float | None, typer.Option(min=0, help="Begin no row after so many minutes.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="A new result file.")] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu to try it out.")] = "cuda",
    json_output: JsonOption = False,
) -> None:
    """Measure what a user of `model.generate` gets: plain, and inside `duotone.enable`.

    Time to first token, ms per token, memory, and what a GPU is idle. Random weights of a real
    shape take the time of trained ones.

    [bold]Examples[/bold]

      duotone bench generate

      duotone bench generate --batch 32 --tokens 8292 --row plain --row duotone@1
    """
    import torch

    from duotone.bench.generate import DEFAULT_ROWS, check_row, header
    from duotone.report.provenance import write_new_json

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU and a CUDA build of torch; got neither")
    if out is not None and out.exists():
        raise ValueError(f"--out must be a new file, got the existing {str(out)!r}")
    rows = row or list(DEFAULT_ROWS)
    for name in rows:
        try:
            check_row(name)
        except ImportError as error:
            typer.echo(f"{name}: {error}", err=True)
    bench = _bench(model, torch.device(device), (batch, tokens, new, padded, calls))
    if recipe is not None:
        _quantize(bench, recipe)
    result, begin = header(bench), monotonic()
    for name in rows:
        late = minutes is not None and monotonic() - begin > 60 * minutes
        found = {"row": name, "reason": "out of time"} if late else bench.row(name)
        result["rows"].append(found)
        if not json_output:
            typer.echo(line(found))
    if out is not None:
        write_new_json(out, result)
    if json_output:
        print_json(result)


def _bench(model: str, device: Any, asked: tuple[int, int, int, bool, int]) -> Any:
    import torch

    from duotone.bench.generate import Bench, Load
    from duotone.inference.random_models import (
        SHAPES,
        prompt_of_noise,
        random_model,
        random_prompt,
    )

    load = Load(*asked)
    if model in SHAPES:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        made = random_model(model, device, dtype)
        given = random_prompt(model, made, load.batch, load.tokens, load.padded)
        return Bench(model, made, load, given)
    if load.padded:
        raise ValueError(f"--padded needs a model of random weights, one of {sorted(SHAPES)}")
    loaded = load_model(model, str(device))
    return Bench(model, loaded.model, load, prompt_of_noise(loaded, load.batch, load.tokens))


def _quantize(bench: Any, recipe: str) -> None:
    """Quantize the model in place by its own prompt, and fuse what kernels can fuse."""
    from duotone.hf.weights.fusion import fuse
    from duotone.quantize import quantize_model
    from duotone.quantize.calibration import CalibrationSet
    from duotone.weights import get_recipe

    typer.echo(f"quantizing the weights by {recipe}", err=True)
    quantize_model(bench.model, get_recipe(recipe), CalibrationSet([bench.inputs], {}, []))
    fuse(bench.model)
    bench.weights = recipe


def line(row: dict[str, Any]) -> str:
    """Line of one row."""
    if "reason" in row:
        return f"{row['row']:26s} {row['reason']}"
    parts = [
        f"{row['row']:26s} first token {row['ttft_ms']:.0f} ms (first call "
        f"{row['first_ttft_ms']:.0f})",
        f"{row['ms_per_token']:.2f} ms per token (first call {row['first_ms_per_token']:.2f}, "
        f"longest {row['longest_ms']:.1f})",
        f"{row['tokens_per_s']:,.0f} tokens/s",
    ]
    if row["idle"] is not None:
        parts.append(f"idle {100 * row['idle']:.0f} %, peak {row['peak_bytes'] / 1e9:.2f} GB")
    if "cache_bytes" in row:
        parts.append(f"cache {row['cache_bytes'] / 1e6:,.0f} MB")
    return ", ".join(parts)


if __name__ == "__main__":
    typer.run(command)
