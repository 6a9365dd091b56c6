"""`duotone calibrate`: bases for K and V from one's own model, and a spec of them."""

import shlex
import sys
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer

from .common import (
    DataOption,
    DeviceOption,
    JsonOption,
    ModelArgument,
    print_json,
    progress_bar,
    scheme_spec,
    user_errors,
)
from .samples import load_with_data, sampled_tasks, without_data

HELD_OUT = 8


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
            "--out", "-o", help="Writes OUT.safetensors, OUT.json and OUT.report.json, all new."
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
        int, typer.Option(help="Tokens at the end of a text model's stream that stay in 16 bit.")
    ] = 32,
    group: Annotated[
        int, typer.Option(help="Tokens of a text model that are packed at once.")
    ] = 64,
    keep_found: Annotated[
        bool, typer.Option(help="Write the calibrated spec, also where a preset is better.")
    ] = False,
    text: Annotated[
        str | None,
        typer.Option(
            help="Scheme of text and answers beside the pictures, e.g. duotone-mixed@4, or a .json "
            "file.",
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
    that is nearer to 16 bit takes the place of the calibrated spec in OUT.json.

    After an interruption it begins anew.

    [bold]Examples[/bold]

      duotone calibrate -o mine

      duotone calibrate OpenGVLab/InternVL3-1B-hf --text duotone-mixed@4 -o mine

      duotone calibrate OpenGVLab/InternVL3-1B-hf --task mine.jsonl --samples 32 --bits 1 -o mine

      duotone compare --scheme mine.json
    """
    from duotone.calibrate import Settings, calibrate, check_files, compare, write
    from duotone.calibrate.text import check_has_pictures
    from duotone.inference.encoded import CONTEXT
    from duotone.quant.our_schemes import with_pictures

    settings = Settings(bits, regularization, foreground or None, group, recent)
    cut, own = CONTEXT if context is None else context, without_data(context)
    tasks, samples = sampled_tasks(task, model, samples, cut, own=own)
    files, words = check_files(out), _text_spec(text)
    sizes = {"samples": samples, "batch_size": batch_size}
    sizes["heldout"] = max(3, HELD_OUT // len(tasks)) if heldout is None else heldout
    loaded, data = load_with_data(model, device, settings, tasks, **sizes)
    if words is not None:
        check_has_pictures(loaded.model, data.batches, words)
    started = perf_counter()
    with progress_bar("calibrating") as progress:
        bases, found, report = calibrate(
            loaded, data.batches, settings, file=str(files[0]), data=data.sources, progress=progress
        )
    seconds, spec, end = {"calibration": perf_counter() - started}, found, None
    if data.heldout:
        with progress_bar("comparing with presets") as progress:
            end, spec = compare(
                loaded, bases, found, data.heldout, keep_found=keep_found, progress=progress
            )
        seconds["comparison"] = perf_counter() - started - seconds["calibration"]
    report |= {"command": shlex.join(["duotone", *sys.argv[1:]])}
    report |= {"verdict": end and end.to_dict(), "seconds": seconds, "text": text}
    if words is not None:
        spec, found = (with_pictures(words, pictures) for pictures in (spec, found))
    written = [str(path) for path in write(bases, spec, out, report, found)]
    if json_output:
        print_json(report | {"files": written})
    else:
        _show(report, written, model)


def _text_spec(text: str | None) -> Any:
    """CacheSpec of the scheme of text; None for 16 bit. Errors: ValueError as for `check_text`."""
    from duotone.calibrate.text import check_text

    if text is None:
        return None
    spec = scheme_spec(text, None)
    check_text(spec)
    return spec


def _show(report: dict[str, Any], files: list[str], model: str | None) -> None:
    """Show bits of K and V by layer, the comparison, and the use of the files."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("layer", "", "tokens", "bits", "error / variance", "channels by width")
    for row in report["tensors"]:
        share = row["error"] / row["variance"] if row["variance"] else 0.0
        classes = ", ".join(f"{part:.3g} at {bits}" for bits, part in row["classes"])
        bits = f"{row['bits']:.3g}"
        table.add_row(str(row["layer"]), row["which"], row["part"], bits, f"{share:.2g}", classes)
    console.print(table)
    header = report["header"]
    console.print(
        f"[bold]{report['bits']:.3f} code bits per number[/], from {header['tokens']} tokens and "
        f"{header['queries']} queries."
    )
    not_compared = ["No samples were held out: nothing says that this spec beats a preset."]
    for sentence in report["verdict"]["sentences"] if report["verdict"] else not_compared:
        console.print(sentence, style="bold", markup=False, soft_wrap=True)
    if report["text"] is not None:
        compared = "; they had 16 bit in the comparison" if report["verdict"] else ""
        console.print(f"Text and answers are as in {report['text']}{compared}.", markup=False)
    console.print("Written: " + ", ".join(files), soft_wrap=True)
    of = [] if model is None else ["--model", model]
    use = shlex.join(["duotone", "compare", *of, "--scheme", files[1]])
    console.print(f"Use it:  {use}", soft_wrap=True)
