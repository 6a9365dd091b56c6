"""`duotone inspect`: spectra of K and V, and gains of calibrated bases."""

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
        float, typer.Option("--bits", "-b", help="Code bits per number that gains are for.")
    ] = 1.0,
    batch_size: Annotated[int, typer.Option(min=1)] = 4,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show whether a model profits from calibrated transform coding, before deploying it.

    Per layer, for K and V: the effective dimensions, the gain of decorrelation, and the share of
    K's energy in few tokens. Also the expected error of calibrated codes against plain codes of as
    many bits. What a scheme costs on this model, duotone evaluate and duotone compare say.

    [bold]Examples[/bold]

      duotone inspect -n 4

      duotone inspect path/to/model --task mine.jsonl

      duotone inspect --json > look.json
    """
    from duotone.calibrate import Settings
    from duotone.inspection import inspect_model

    settings = Settings(bits=bits)
    tasks = sampled_tasks(task, model, samples)
    sizes = {"samples": samples, "batch_size": batch_size}
    loaded, data = load_with_data(model, device, settings, tasks, **sizes)
    with progress_bar("inspecting") as progress:
        report = inspect_model(loaded, data, settings, progress)
    if json_output:
        print_json(report)
    else:
        _show(report)


def _show(report: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    console.print(_layers_table(report))
    total, header = report["total"], report["header"]
    console.print(
        f"[bold]{total['gain']:.2f}x less error expected[/] at {total['bits']:.3f} code bits per "
        f"number, from {header['tokens']} tokens and {header['queries']} queries."
    )


def _layers_table(report: dict[str, Any]) -> Any:
    """A row per layer and tensor."""
    from rich.table import Table

    title = f"{report['header']['model']}, head_dim {report['header']['head_dim']}"
    table = Table("layer", "", title=title, title_justify="left")
    for name in ("rank", "coding gain", "energy in front", "code bits", "error saved"):
        table.add_column(name, justify="right")
    for row in report["layers"]:
        front = row["foreground_energy"]
        table.add_row(
            str(row["layer"]),
            row["which"],
            f"{row['effective_rank']:.1f}",
            f"{row['coding_gain_bits']:.2f} bit",
            "" if front is None else f"{100 * front:.0f} %",
            f"{row['bits']:.2f}",
            f"{row['gain']:.2f}x",
            end_section=row["which"] == "value",
        )
    return table
