"""`duotone bench`: measurements on a GPU; one file per command."""

import typer

from . import bench_generate, bench_kernel, bench_serve

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure on a GPU, against the fastest 16-bit attention there is.",
)

app.command("kernel")(bench_kernel.command)
app.command("generate")(bench_generate.command)
app.command("serve")(bench_serve.command)
