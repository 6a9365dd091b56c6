"""The command line: one file per command. Heavy imports happen inside the commands."""

import typer

from . import (
    bench,
    calibrate,
    compare,
    evaluate,
    generate,
    inspect,
    plan,
    quantize,
    report,
    schemes,
    tune,
)

app = typer.Typer(
    name="duotone",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    help="Multimodal LLMs on few bits: 1-bit visual KV caches on Hugging Face transformers.\n\n"
    "Start with [bold]duotone compare[/bold]: it needs no arguments and no network.",
)

app.command("compare")(compare.command)
app.command("generate")(generate.command)
app.command("schemes")(schemes.command)
app.command("evaluate")(evaluate.command)
app.command("tune")(tune.command)
app.command("calibrate")(calibrate.command)
app.command("quantize")(quantize.command)
app.command("inspect")(inspect.command)
app.command("plan")(plan.command)
app.add_typer(bench.app, name="bench")
app.command("report")(report.command)


def main() -> None:
    """Entry point of the `duotone` script."""
    app()
