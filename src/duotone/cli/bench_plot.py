"""`duotone bench plot`: pictures from result files."""

from pathlib import Path
from typing import Annotated

import typer

from .common import check_folder, user_errors


@user_errors
def command(
    results: Annotated[list[Path], typer.Argument(help="Result files of duotone bench.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("."),
    form: Annotated[str, typer.Option("--format", help="png or svg.")] = "png",
) -> None:
    """Draw the pictures that belong to result files (needs matplotlib).

    [bold]Examples[/bold]

      duotone bench plot results/kernels/h200.json --out docs/img --format svg
    """
    from duotone.report.plots import draw

    check_folder(out)
    for path in draw(results, out, form):
        typer.echo(str(path))
