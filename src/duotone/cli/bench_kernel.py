"""`duotone bench kernel`: decode attention of every scheme against the best 16-bit backend."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import JsonOption, error_console, print_json, progress_bars, user_errors

# A row was wrong or failed; all other rows are in the output.
FAILED = 1
# `kernel_tables.HEADER`, as short as it gets.
TITLES = ("K and V", "by", "rotated", "clean", "do_bench", "MB", "TB/s", "of copy")
TITLES += ("x rot.", "x clean", "x do_b.", "first s")
TABLE_WIDTH = 126


@user_errors
def command(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="batch,q_heads,kv_heads,tokens[,head_dim]", show_default="seven"),
    ] = None,
    scheme: Annotated[
        list[str] | None, typer.Option("--scheme", "-s", help="Rows by name.", show_default="all")
    ] = None,
    impl: Annotated[
        list[str] | None,
        typer.Option(help="cuda, triton, reference (slow).", show_default="cuda, triton"),
    ] = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            help="decode; pack: quantization against a copy; step: served decode steps on pages.",
            show_default="decode",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="The first shape, few launches, no slow compilers.")
    ] = False,
    minutes: Annotated[
        float | None,
        typer.Option(help="Start no row later; rows left out are named.", show_default="none"),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Most launches per row and method.")] = 50,
    out: Annotated[
        Path | None, typer.Option(help="New JSON file with all numbers.", show_default="none")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Time decode attention of every scheme against the fastest 16-bit attention on this GPU.

    Every row is first checked against the reference on a small shape. Times are by three methods
    (docs/kernels.md), each compared with the best 16-bit backend by the same method. Exit code 1:
    some row was wrong or failed.

    [bold]Examples[/bold]

      duotone bench kernel --quick

      duotone bench kernel --minutes 4 --out results/kernels/h200.json

      duotone bench kernel --shape 32,32,8,8192 --scheme "1 bit" --scheme kivi-2 --impl cuda

      duotone bench kernel --table decode --table pack
    """
    settings = _settings(shape, scheme, impl, table, quick, minutes, repeats)
    if out is not None and out.exists():
        raise ValueError(f"--out must be a new file, got the existing {str(out)!r}; name another")
    from duotone.bench.kernel import failures, run_kernels
    from duotone.bench.timing import CudaClock
    from duotone.report.provenance import write_new_json

    clock = CudaClock()
    with progress_bars() as show_stage:
        show_stage("rows", 0, None, "copy bandwidth")
        result = run_kernels(
            settings, clock, lambda what, done, total: show_stage("rows", done, total, what)
        )
    if out is not None:
        write_new_json(out, result)
    if json_output:
        print_json(result)
    else:
        show(result)
    wrong = failures(result)
    for line in wrong:
        error_console().print(f"[bold red]{line}[/]", soft_wrap=True)
    if wrong:
        raise typer.Exit(FAILED)


def _settings(
    shape: list[str] | None,
    scheme: list[str] | None,
    impl: list[str] | None,
    table: list[str] | None,
    quick: bool,
    minutes: float | None,
    repeats: int,
) -> Any:
    from duotone.bench.kernel import Settings
    from duotone.bench.schemes import select
    from duotone.bench.shapes import SHAPES, Shape

    settings = Settings(
        shapes=[Shape.parse(text) for text in shape] if shape else SHAPES,
        schemes=select(scheme),
        impls=list(dict.fromkeys(impl or ["cuda", "triton"])),
        minutes=minutes,
        repeats=repeats,
        tables=table or ["decode"],
    )
    return settings.quick() if quick else settings


def show(result: dict[str, Any]) -> None:
    """The tables of a result on the terminal."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from duotone.report.kernels import (
        absent,
        packing_table,
        row_cells,
        rows_of,
        shape_title,
        step_table,
    )

    console = Console()
    # Cells that wrap are harder to read than lines that do.
    console.width = max(console.width, TABLE_WIDTH)
    for shape in result["shapes"] if result["rows"] else ():
        title = f"{shape_title(shape)}: times in us, x over the best 16-bit row by the same method"
        table = Table(*TITLES, title=title, title_justify="left", box=SIMPLE, padding=(0, 1, 0, 0))
        for row in rows_of(result, shape):
            if row["status"] == "ok":
                table.add_row(*row_cells(row))
        console.print(table)
        for (status, reason), names in absent(result, shape).items():
            console.print(f"{status}: {', '.join(names)} ({reason})", markup=False, soft_wrap=True)
    for name, render in (("pack", packing_table), ("step", step_table)):
        if result[name] is not None and result[name]["status"] == "ok":
            console.print(render([result]), markup=False, soft_wrap=True)
    console.print(f"{result['device']}, device-to-device copy {result['copy_tb_per_s']:.2f} TB/s")
