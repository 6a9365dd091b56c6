"""`duotone calibrate`: bases for K and V from one's own model and samples, and a spec of them."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import (
    DeviceOption,
    JsonOption,
    ModelArgument,
    SamplesOption,
    TasksOption,
    print_json,
    progress_bar,
    user_errors,
)
from .samples import load_with_data, sampled_tasks


@user_errors
def command(
    model: ModelArgument = None,
    task: TasksOption = None,
    samples: SamplesOption = 16,
    bits: Annotated[
        float, typer.Option("--bits", "-b", help="Code bits per number, mean over all K and V.")
    ] = 1.0,
    out: Annotated[
        Path, typer.Option("--out", "-o", help="Writes OUT.safetensors and OUT.json, both new.")
    ] = Path("calibrated"),
    foreground: Annotated[
        float,
        typer.Option(help="Share of a picture's tokens that are salient; 0: no background."),
    ] = 0.45,
    regularization: Annotated[
        float,
        typer.Option(
            help="Weight of the identity in the error metric: 1 for use on any data, 0.1 on data "
            "like the calibration's."
        ),
    ] = 1.0,
    batch_size: Annotated[int, typer.Option(min=1)] = 4,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Find the bases in which a model's K and V take few bits; write them with a spec.

    Reads the tasks' calibration samples and answers them in 16 bit. K of the visual tokens (of all
    tokens in a text model) is decorrelated in the metric of the queries after them. V is
    decorrelated in the metric of the output projection. A picture's salient tokens are stored
    separately from its background. Bits go where they save most error, in all layers together.

    After an interruption it begins anew.

    [bold]Examples[/bold]

      duotone calibrate -o mine

      duotone calibrate OpenGVLab/InternVL3-1B-hf --task mine.jsonl --samples 32 --bits 1 -o mine

      duotone compare --scheme mine.json
    """
    from duotone.calibrate import Settings, calibrate, check_files, write

    settings = Settings(bits, regularization, foreground or None)
    tasks = sampled_tasks(task, model, samples)
    files = check_files(out)
    sizes = {"samples": samples, "batch_size": batch_size}
    loaded, data = load_with_data(model, device, settings, tasks, **sizes)
    with progress_bar("calibrating") as progress:
        bases, spec, report = calibrate(
            loaded, data.batches, settings, file=str(files[0]), data=data.sources, progress=progress
        )
    write(bases, spec, out)
    if json_output:
        print_json(report | {"files": [str(path) for path in files]})
    else:
        _show(report, files)


def _show(report: dict[str, Any], files: tuple[Path, Path]) -> None:
    """Show bits of K and V by layer, and the use of the files."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("layer", "", "tokens", "bits", "error / variance", "channels by width")
    for row in report["tensors"]:
        share = row["error"] / row["variance"] if row["variance"] else 0.0
        classes = ", ".join(f"{part:.3g} at {bits}" for bits, part in row["classes"])
        bits = f"{row['bits']:.3g}"
        table.add_row(str(row["layer"]), row["which"], row["part"], bits, f"{share:.2g}", classes)
    console.print(table)
    header = report["header"]
    console.print(
        f"[bold]{report['bits']:.3f} code bits per number[/], from {header['tokens']} tokens and "
        f"{header['queries']} queries."
    )
    console.print("Written: " + ", ".join(str(path) for path in files), soft_wrap=True)
    console.print(f"Use it:  duotone compare --scheme {files[1]}", soft_wrap=True)
