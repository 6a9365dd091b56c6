"""`duotone calibrate`: bases for K and V from one's own model, and a spec of them."""

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import (
    DataOption,
    DeviceOption,
    JsonOption,
    ModelArgument,
    error_console,
    print_json,
    progress_bar,
    scheme_spec,
    user_errors,
)
from .samples import load_with_data, sampled_tasks, without_data


@user_errors
def command(
    model: ModelArgument = None,
    task: DataOption = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", "-n", help="Per task.", show_default="16; 48 made-up ones"),
    ] = None,
    heldout: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Per task, to compare with presets on; 0: no comparison.",
            show_default="8 over all tasks, at least 3 per task",
        ),
    ] = None,
    bits: Annotated[
        float | None,
        typer.Option(
            "--bits",
            "-b",
            help="Code bits per number, mean over all K and V. Pictures count them as if scales "
            "had 16 bits: these have 8, and codes get more.",
            show_default="the true bits of duotone@1; 2 for text",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "-o",
            help="Writes OUT.safetensors, OUT.json and OUT.report.json, all new; OUT.text."
            "safetensors for calibrated text.",
        ),
    ] = Path("calibrated"),
    foreground: Annotated[
        float,
        typer.Option(help="Share of a picture's tokens that are salient; 0: no background."),
    ] = 0.45,
    regularization: Annotated[
        float | None,
        typer.Option(
            help="Weight of the identity in the error metric, against the model's own: 0.1 for use "
            "on data like the calibration's.",
            show_default="100 for spans in two parts, 10 for text, else 1",
        ),
    ] = None,
    recent: Annotated[
        int, typer.Option(help="Tokens at the end of calibrated text that stay in 16 bit.")
    ] = 32,
    group: Annotated[
        int, typer.Option(help="Tokens of calibrated text that are packed at once.")
    ] = 64,
    keep_found: Annotated[
        bool, typer.Option(help="Write the calibrated spec, also where a preset is better.")
    ] = False,
    text: Annotated[
        str | None,
        typer.Option(
            help="Text and answers beside the pictures: calibrated@2 (code bits) on text that the "
            "model writes itself; or a scheme, e.g. duotone-mixed@4, or a .json file.",
            show_default="16 bit",
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a stretch of a .txt file, or of written text.",
            show_default="1024; 512 of written text",
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 4,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Find the bases in which a model's K and V take few bits; write them with a spec.

    Reads calibration samples and answers them in 16 bit. Without --task, a model with pictures gets
    made-up samples: noise, shapes, drawn pictures, random words. A text model gets text that it
    writes itself. K and V of the visual tokens (of all tokens in a text model) are decorrelated. A
    picture's salient tokens are stored separately from its background. Bits go where they save most
    error, in all layers together.

    It ends with a comparison on samples that it did not use. A preset of as many true bits or less
    that is nearer to 16 bit takes the place of the calibrated spec in OUT.json. Calibrated text has
    its own bases and its own comparison.

    After an interruption it begins anew.

    [bold]Examples[/bold]

      duotone calibrate -o mine

      duotone calibrate OpenGVLab/InternVL3-1B-hf --text calibrated@2 -o mine

      duotone calibrate OpenGVLab/InternVL3-1B-hf --task mine.jsonl --samples 32 --bits 1 -o mine

      duotone compare --scheme mine.json
    """
    from duotone.calibrate import Settings, write
    from duotone.calibrate.files import check_files, files_of
    from duotone.calibrate.whole import data_of_words, heldout_of, whole, words_of
    from duotone.inference.encoded import CONTEXT
    from duotone.tasks import WRITTEN

    settings = Settings(bits, regularization, foreground or None, group, recent)
    own = without_data(context)
    tasks, count = sampled_tasks(task, model, samples, context or CONTEXT, own=own)
    words = words_of(text, settings, tasks, model, lambda name: scheme_spec(name, None))
    check_files(out)
    sizes = {"batch_size": batch_size, "heldout": heldout_of(heldout, len(tasks))}
    loaded, data = load_with_data(model, device, settings, tasks, samples=count, **sizes)
    sizes |= {"samples": samples, "heldout": heldout_of(heldout, 1)}
    waiting = error_console().status
    written = data_of_words(words, loaded, data, own[WRITTEN], sizes, waiting)
    given = (loaded, data, settings, words, written, files_of(out))
    end = whole(*given, name=text, keep_found=keep_found, stage=progress_bar)
    report = end.report | {"command": shlex.join(["duotone", *sys.argv[1:]])}
    paths = [str(path) for path in write(end.bases, end.spec, out, report, end.found, end.text)]
    if json_output:
        print_json(report | {"files": paths})
    else:
        _show(report, paths, model)


def _show(report: dict[str, Any], files: list[str], model: str | None) -> None:
    """Show bits of K and V by layer, the comparisons, and the use of the files."""
    from rich.console import Console

    console, text = Console(), report["text"]
    of_text = text if isinstance(text, dict) else None
    rows = [*report["tensors"], *(of_text["tensors"] if of_text else ())]
    console.print(_table(sorted(rows, key=lambda row: row["layer"])))
    _say(console, report, "")
    if of_text:
        _say(console, of_text, "Text: ")
    elif text is not None:
        compared = "; they had 16 bit in the comparison" if report["verdict"] else ""
        console.print(f"Text and answers are as in {text}{compared}.", markup=False)
    console.print("Written: " + ", ".join(files), soft_wrap=True)
    of = [] if model is None else ["--model", model]
    spec = next(file for file in files if file.endswith(".json"))
    use = shlex.join(["duotone", "compare", *of, "--scheme", spec])
    console.print(f"Use it:  {use}", soft_wrap=True)


def _table(rows: list[dict[str, Any]]) -> Any:
    """Table of bits and errors by layer and tensor."""
    from rich.table import Table

    table = Table("layer", "", "tokens", "bits", "error / variance", "channels by width")
    for row in rows:
        share = row["error"] / row["variance"] if row["variance"] else 0.0
        classes = ", ".join(f"{part:.3g} at {bits}" for bits, part in row["classes"])
        bits = f"{row['bits']:.3g}"
        table.add_row(str(row["layer"]), row["which"], row["part"], bits, f"{share:.2g}", classes)
    return table


def _say(console: Any, report: dict[str, Any], of: str) -> None:
    """Print the bits of a calibration and the sentences of its comparison."""
    header = report["header"]
    console.print(
        f"{of}[bold]{report['bits']:.3f} code bits per number[/], from {header['tokens']} tokens "
        f"and {header['queries']} queries."
    )
    not_compared = ["No samples were held out: nothing says that this spec beats a preset."]
    for sentence in report["verdict"]["sentences"] if report["verdict"] else not_compared:
        console.print(f"{of}{sentence}", style="bold", markup=False, soft_wrap=True)
