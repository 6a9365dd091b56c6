"""`duotone bench plot`: a picture from result files."""

from pathlib import Path
from typing import Annotated

import typer

from .common import check_folder, user_errors


@user_errors
def command(
    results: Annotated[list[Path], typer.Argument(help="Result files of duotone bench generate.")],
    out: Annotated[Path, typer.Option(help="Folder for the picture.")] = Path("."),
    form: Annotated[str, typer.Option("--format", help="png or svg.")] = "png",
) -> None:
    """Draw ms per token and memory of all results as one picture (needs matplotlib).

    [bold]Examples[/bold]

      duotone bench plot results/generate/*.json --out docs/img --format svg
    """
    from duotone.report.plots import draw

    check_folder(out)
    typer.echo(str(draw(results, out, form)))
