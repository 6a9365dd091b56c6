"""`duotone inspect`: gains of calibrated bases, and errors of schemes in attention."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import (
    SPEC_SUFFIX,
    DeviceOption,
    JsonOption,
    ModelArgument,
    SamplesOption,
    TasksOption,
    print_json,
    progress_bar,
    scheme_spec,
    user_errors,
)
from .samples import load_with_data, sampled_tasks


@user_errors
def command(
    model: ModelArgument = None,
    task: TasksOption = None,
    samples: SamplesOption = 16,
    scheme: Annotated[
        list[str] | None,
        typer.Option(
            "--scheme",
            "-s",
            help="Also measure this scheme's errors in attention: NAME, NAME@BITS, or a "
            ".json file of a CacheSpec; repeat for more.",
            show_default=False,
        ),
    ] = None,
    bits: Annotated[
        float, typer.Option("--bits", "-b", help="Code bits per number that gains are for.")
    ] = 1.0,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="New folder for inspect.json and pictures."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 4,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Show whether a model profits from calibrated transform coding, before deploying it.

    Per layer, for K and V: the effective dimensions, the gain of decorrelation, and the share of
    K's energy in few tokens. Also the expected error of calibrated codes against plain codes of as
    many bits. For every --scheme: the change of scores, weights and outputs of attention, for the
    questions and answers after the pictures.

    [bold]Examples[/bold]

      duotone inspect -n 4

      duotone inspect path/to/model --task mine.jsonl -s calibquant@1 -s duotone@1 -o look

      duotone inspect -s mine.json --json > look.json
    """
    from duotone.calibrate import Settings
    from duotone.inspection import check_folder_is_new, inspect_model, write_report
    from duotone.report.plots import need_matplotlib

    settings, schemes = Settings(bits=bits), _labelled(scheme or [])
    tasks = sampled_tasks(task, model, samples)
    if out is not None:
        need_matplotlib()
        check_folder_is_new(out)
    sizes = {"samples": samples, "batch_size": batch_size}
    loaded, data = load_with_data(model, device, settings, tasks, **sizes)
    with progress_bar("inspecting") as progress:
        report = inspect_model(loaded, data, settings, schemes, progress)
    files = write_report(report, out) if out is not None else []
    if json_output:
        print_json(report | {"files": [str(path) for path in files]})
    else:
        _show(report, files)


def _labelled(names: list[str]) -> dict[str, Any]:
    """{label: spec}; a spec file counts by its own name."""
    schemes: dict[str, Any] = {}
    for name in names:
        label = Path(name).stem if name.endswith(SPEC_SUFFIX) else name
        if label in schemes:
            raise ValueError(f"schemes need different names, got {label!r} twice; leave one out")
        schemes[label] = scheme_spec(name, None)
    return schemes


def _show(report: dict[str, Any], files: list[Path]) -> None:
    from rich.console import Console

    console = Console()
    console.print(_layers_table(report))
    total, header = report["total"], report["header"]
    console.print(
        f"[bold]{total['gain']:.2f}x less error expected[/] at {total['bits']:.3f} code bits per "
        f"number, from {header['tokens']} tokens and {header['queries']} queries."
    )
    if report["errors"]:
        console.print(_errors_table(report["errors"]))
    if files:
        console.print("Written: " + ", ".join(str(path) for path in files), soft_wrap=True)


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


def _errors_table(errors: list[dict[str, Any]]) -> Any:
    """A row per layer and one for their mean; a column per scheme: MSE of weights, outputs."""
    from rich.table import Table

    title = "MSE of the attention weights, error of the output in % of its norm"
    table = Table("layer", title=title, title_justify="left")
    for entry in errors:
        # Many columns get narrow: cells and names break, nothing is cut off.
        table.add_column(entry["label"], justify="right", overflow="fold")
    columns = [[_error_cell([row]) for row in entry["layers"]] for entry in errors]
    for layer, cells in enumerate(zip(*columns, strict=True)):
        table.add_row(str(layer), *cells)
    table.add_section()
    table.add_row("mean", *(_error_cell(entry["layers"]) for entry in errors))
    return table


def _error_cell(rows: list[dict[str, Any]]) -> str:
    mse, error = (sum(r[n] for r in rows) / len(rows) for n in ("weights_mse", "output_error"))
    return f"{mse:.1e} {100 * error:.1f}%"
