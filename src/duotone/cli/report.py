"""`duotone report`: tables from result files, on the terminal or into a README."""

from pathlib import Path
from typing import Annotated

import typer

from .common import JsonOption, print_json, user_errors


@user_errors
def command(
    results: Annotated[
        Path, typer.Option("--results", help="Folder with result files, searched recursively.")
    ] = Path("results"),
    readme: Annotated[
        Path | None,
        typer.Option(help="Markdown file whose marked tables are rewritten from the results."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 if the file is out of date.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Render Markdown tables from result files; numbers in a README are never typed.

    A table stands between the lines [bold]<!-- duotone:NAME -->[/bold] and
    [bold]<!-- /duotone:NAME -->[/bold]; without --readme all tables are printed.

    [bold]Examples[/bold]

      duotone report

      duotone report --readme README.md
    """
    from duotone.report import tables as report

    tables = report.tables(results)
    if readme is not None:
        changed = report.update_file(readme, tables, write=not check)
        message = f"{readme}: {'out of date' if check and changed else 'up to date'}"
        typer.echo(message, err=True)
        raise typer.Exit(1 if check and changed else 0)
    if json_output:
        print_json(tables)
    else:
        typer.echo("\n".join(f"## {name}\n\n{table}\n" for name, table in tables.items()))
