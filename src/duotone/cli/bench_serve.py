"""`duotone bench serve`: cache dtypes of vLLM at equal cache memory."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from .card import parse_bytes
from .common import JsonOption, print_json, say, user_errors

PROMPTS = 256


@user_errors
def command(
    model: Annotated[str, typer.Argument(help="Folder or hub name of a model that vLLM serves.")],
    cache: Annotated[str, typer.Option("--cache", help="Memory of the KV cache, e.g. 30GB.")],
    rows: Annotated[
        list[str] | None, typer.Option("--row", help="Row to measure; repeat. Default: all.")
    ] = None,
    rates: Annotated[str, typer.Option("--rates", help="Requests per second.")] = "1,4,inf",
    input_tokens: Annotated[int, typer.Option("--input-tokens", min=1)] = 4096,
    output_tokens: Annotated[int, typer.Option("--output-tokens", min=1)] = 2048,
    prompts: Annotated[
        int | None,
        typer.Option("--prompts", min=1, help="Per rate.", show_default=str(PROMPTS)),
    ] = None,
    waves: Annotated[
        int | None,
        typer.Option(
            "--waves",
            min=1,
            help="In place of --prompts: so many times the requests that the row's cache holds.",
        ),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(
            "--max-model-len", min=1, help="Of the servers. Default: what requests need, and 64."
        ),
    ] = None,
    server_options: Annotated[
        str,
        typer.Option("--server-options", help="More options of every server, in quotes."),
    ] = "",
    seed: Annotated[int, typer.Option("--seed")] = 0,
    start: Annotated[float, typer.Option("--start", help="Seconds a server may take.")] = 900.0,
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Result file; rows that it has are skipped."),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Measure `vllm serve` with vLLM's own client: each cache dtype at equal cache memory.

    [bold]Example[/bold]

      duotone bench serve MODEL --cache 30GB --row bf16 --row duotone_2bit
    """
    from duotone.bench.serve import ROWS, Load, run

    size = parse_bytes(cache)
    sent = tuple(rates.split(","))
    more = tuple(shlex.split(server_options))
    if prompts is None and waves is None:
        prompts = PROMPTS
    load = Load(
        *(model, size, input_tokens, output_tokens, prompts, sent, seed, max_model_len, more),
        waves=waves,
    )
    name = f"{Path(model).name}-{size / 1e9:g}GB-{input_tokens}+{output_tokens}.json"
    path = out or Path("results") / "serve" / name
    result = run(load, rows or list(ROWS), path, start, say)
    if json_output:
        print_json(result)
    else:
        typer.echo(str(path))
    raise typer.Exit(1 if any("reason" in row for row in result["rows"]) else 0)
