"""`duotone evaluate`: scores of schemes on a task."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .common import (
    DeviceOption,
    JsonOption,
    LaterOption,
    ModelOption,
    check_folder,
    load_model,
    print_json,
    progress_bar,
    scheme_spec,
    user_errors,
)
from .memory import explained_out_of_memory, token_counts


@user_errors
def command(
    task: Annotated[
        str, typer.Argument(help="captions, documents, sequences, or a .jsonl file of your own.")
    ],
    scheme: Annotated[
        list[str] | None,
        typer.Option("--scheme", "-s", help="Repeat for more.", show_default="duotone"),
    ] = None,
    bits: Annotated[
        list[int] | None,
        typer.Option("--bits", "-b", help="Bits; repeat for more.", show_default="scheme's"),
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", "-n", min=1, show_default="500, or all of a file")
    ] = None,
    split: Annotated[str, typer.Option(help="heldout, calibration or train.")] = "heldout",
    model: ModelOption = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    kl: Annotated[
        bool, typer.Option("--kl", help="Also score next-token agreement by teacher forcing.")
    ] = False,
    later_question: LaterOption = False,
    seed: Annotated[int, typer.Option(help="Of the bootstrap.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for one JSON per scheme; finished ones are not run again."),
    ] = None,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Score schemes on a task with 95 % intervals, against the 16-bit cache.

    A .jsonl file has one {"images": [...], "question": ..., "answers": [...]} per line, with
    image paths relative to the file.

    [bold]Examples[/bold]

      duotone evaluate documents -s duotone -s calibquant -b 1 -b 2 -n 100

      duotone evaluate mine.jsonl --model OpenGVLab/InternVL3-1B-hf --out results/mine
    """
    from duotone.evaluate import evaluate
    from duotone.tasks import get_task

    chosen = get_task(task)
    samples = samples or chosen.size or 500
    chosen.check_samples(samples)
    schemes = _labelled(scheme or ["duotone"], bits)
    check_folder(out)
    messages = chosen.example(0, split).messages()
    loaded = load_model(model, device)
    widest = next(iter(schemes.values()))
    counts = token_counts(loaded, messages, chosen.max_new_tokens)
    with (
        progress_bar(chosen.name) as progress,
        explained_out_of_memory(loaded.model, widest, counts),
    ):
        evaluation = evaluate(
            loaded.model,
            loaded.processor,
            chosen,
            schemes,
            samples,
            model_name=loaded.name,
            out=out,
            progress=progress,
            split=split,
            batch_size=batch_size,
            kl=kl,
            later_question=later_question,
            seed=seed,
        )
    if json_output:
        print_json(evaluation.results)
    else:
        _show(evaluation.results)


def _labelled(names: list[str], bits: list[int] | None) -> dict[str, Any]:
    if not bits:
        return {name: scheme_spec(name, None) for name in names}
    return {f"{name}-{b}bit": scheme_spec(name, b) for name in names for b in bits}


def _columns(results: dict[str, dict[str, Any]]) -> list[list[str]]:
    """One list of cells per scheme, headed by its name, after one list of row names."""
    metrics = list(dict.fromkeys(name for r in results.values() for name in r["metrics"]))
    columns = [["", "true bits", *metrics]]
    for label, result in results.items():
        memory = result["memory"]
        bits = memory.get("visual_bits_per_element") or memory["bits_per_element"]
        cells = [_cell(result["metrics"].get(name)) for name in metrics]
        columns.append([label, f"{bits:.2f}", *cells])
    return columns


def _show(results: dict[str, dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = next(iter(results.values()))
    columns = _columns(results)
    if len(columns) > len(columns[0]):  # many schemes: one row each
        columns = [list(row) for row in zip(*columns, strict=True)]
    title = f"{first['configuration']['task']}, {first['samples']} samples, 95 % intervals"
    table = Table(*(column[0] for column in columns), title=title, title_justify="left")
    for row in zip(*(column[1:] for column in columns), strict=True):
        table.add_row(*row)
    Console().print(table)


def _cell(interval: dict[str, float] | None) -> str:
    if interval is None:
        return "-"
    return f"{interval['value']:.3f} [dim]{interval['low']:.3f}..{interval['high']:.3f}[/]"
