"""The command line: one file per command. Heavy imports happen inside the commands."""

from typing import Annotated

import typer

from duotone import __version__

from . import (
    bench,
    calibrate,
    compare,
    demo,
    evaluate,
    plan,
    quantize,
    recommend,
    report,
    schemes,
    supports,
    tune,
)

app = typer.Typer(
    name="duotone",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Multimodal LLMs on few bits: 1-bit visual KV caches on Hugging Face transformers.\n\n"
    "Start with [bold]duotone compare[/bold], or [bold]duotone demo[/bold] for a page: both need "
    "no arguments and no network.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"duotone {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


app.command("compare")(compare.command)
app.command("demo")(demo.command)
app.command("schemes")(schemes.command)
app.command("evaluate")(evaluate.command)
app.command("tune")(tune.command)
app.command("calibrate")(calibrate.command)
app.command("quantize")(quantize.command)
app.command("supports")(supports.command)
app.command("recommend")(recommend.command)
app.command("plan")(plan.command)
app.add_typer(bench.app, name="bench")
app.command("report")(report.command)


def main() -> None:
    """Entry point of the `duotone` script."""
    app()
