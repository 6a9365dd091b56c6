"""`duotone report`: tables from result files, into the pages of a repository or printed."""

from pathlib import Path
from typing import Annotated

import typer

from .common import JsonOption, print_json, user_errors


@user_errors
def command(
    pages: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Markdown pages to bring up to date. Default: README.md, docs/*.md and every "
            "page below --results that has a marked table."
        ),
    ] = None,
    results: Annotated[
        Path, typer.Option("--results", help="Folder with result files, searched recursively.")
    ] = Path("results"),
    check: Annotated[
        bool, typer.Option("--check", help="Change nothing; exit 1 if a page is out of date.")
    ] = False,
    printed: Annotated[
        bool, typer.Option("--print", help="Print all tables and change no page.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Bring Markdown tables up to date with result files; numbers of a page are never typed.

    A table stands between the lines [bold]<!-- duotone:NAME -->[/bold] and
    [bold]<!-- /duotone:NAME -->[/bold] of a page.

    [bold]Examples[/bold]

      duotone report

      duotone report --check

      duotone report --results mine --print
    """
    from duotone.report import pages as report
    from duotone.report.tables import RENDERERS, tables

    rendered = tables(results)
    if not rendered:
        schemas = sorted({schema for schema, _ in RENDERERS.values()})
        raise ValueError(
            f"--results must have a result file of a schema that has a table ({schemas}, and those "
            f"of the repository's own benchmarks), got none in {str(results)!r}. Name the folder "
            "that a command wrote its results to."
        )
    if json_output:
        print_json(rendered)
    elif printed:
        typer.echo("\n".join(f"## {name}\n\n{table}\n" for name, table in rendered.items()))
    else:
        mine = pages or report.marked_pages(results)
        changed = [page for page in mine if report.update_file(page, rendered, write=not check)]
        for page in changed:
            typer.echo(f"{page}: {'out of date' if check else 'rewritten'}", err=True)
        typer.echo(f"{len(mine) - len(changed)} of {len(mine)} pages were up to date", err=True)
        raise typer.Exit(1 if check and changed else 0)
