"""`duotone calibrate`: bases for K and V from one's own model, and a spec of them."""

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
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
    from duotone.calibrate.files import BASES, TEXT, check_files, files_of
    from duotone.inference.encoded import CONTEXT

    settings = Settings(bits, regularization, foreground or None, group, recent)
    own = without_data(context)
    tasks, count = sampled_tasks(task, model, samples, context or CONTEXT, own=own)
    words, files = _words(text, settings, tasks, model), files_of(out)
    check_files(out)
    sizes = {"batch_size": batch_size, "heldout": _heldout(heldout, len(tasks))}
    loaded, data = load_with_data(model, device, settings, tasks, samples=count, **sizes)
    sizes |= {"samples": samples, "heldout": _heldout(heldout, 1)}
    written = _data_of_words(words, loaded, data, own, sizes)
    end = _calibrated(loaded, data, settings, files[BASES], keep_found)
    if written is not None:
        words = _calibrated(loaded, written, words, files[TEXT], keep_found, " text")
    end, of_text = _with_words(end, words, text)
    report = end.report | {"command": shlex.join(["duotone", *sys.argv[1:]])}
    paths = [str(path) for path in write(end.bases, end.spec, out, report, end.found, of_text)]
    if json_output:
        print_json(report | {"files": paths})
    else:
        _show(report, paths, model)


def _heldout(asked: int | None, tasks: int) -> int:
    """Held-out samples of each of so many tasks."""
    return max(3, HELD_OUT // tasks) if asked is None else asked


def _words(text: str | None, settings: Any, tasks: list[Any], model: str | None) -> Any:
    """Settings of calibrated text, or the CacheSpec of a scheme of text; None for 16 bit.

    Errors: ValueError for schemes that cannot stand beside pictures, and where no task has any.
    """
    from duotone.calibrate.text import check_text, no_pictures, text_settings
    from duotone.tasks import WRITTEN

    if text is None:
        return None
    words = text_settings(text, settings)
    if words is None:
        words = scheme_spec(text, None)
        check_text(words)
    if all(task.name == WRITTEN for task in tasks):
        raise no_pictures(model)
    return words


def _data_of_words(words: Any, loaded: Any, data: Any, own: Any, sizes: dict[str, Any]) -> Any:
    """Data of text that is to be calibrated; None for other text, which the model can have.

    Errors: ValueError for a model without pictures, and for text that does not fit.
    """
    from duotone.calibrate import Settings
    from duotone.calibrate.text import check_has_pictures, written_data
    from duotone.tasks import WRITTEN

    if words is None:
        return None
    is_calibrated = isinstance(words, Settings)
    check_has_pictures(loaded.model, data.batches, None if is_calibrated else words)
    if not is_calibrated:
        return None
    with error_console().status("writing text"):
        return written_data(loaded, own[WRITTEN], words, **sizes)


@dataclass(frozen=True)
class _End:
    """End of a calibration. found: its spec; spec: the one to use."""

    bases: Any
    found: Any
    spec: Any
    report: dict[str, Any]


def _calibrated(
    loaded: Any, data: Any, settings: Any, file: Path, keep_found: bool, of: str = ""
) -> _End:
    """Calibrate on some data, and compare on what is held out of it. of: what, for the bars."""
    from duotone.calibrate import calibrate, compare

    started = perf_counter()
    with progress_bar(f"calibrating{of}") as progress:
        bases, found, report = calibrate(
            loaded, data.batches, settings, file=str(file), data=data.sources, progress=progress
        )
    seconds, spec, end = {"calibration": perf_counter() - started}, found, None
    if data.heldout:
        with progress_bar(f"comparing{of} with presets") as progress:
            end, spec = compare(
                loaded, bases, found, data.heldout, keep_found=keep_found, progress=progress
            )
        seconds["comparison"] = perf_counter() - started - seconds["calibration"]
    report |= {"verdict": end and end.to_dict(), "seconds": seconds}
    return _End(bases, found, spec, report)


def _with_words(end: _End, words: Any, name: str | None) -> tuple[_End, Any]:
    """(pictures with the text beside them, bases of the text or None).

    words: a CacheSpec, the end of its own calibration, or None for 16 bit. name: as it was named.
    """
    from duotone.calibrate.text import joined
    from duotone.quant.our_schemes import with_pictures

    if isinstance(words, _End):
        depth = len(end.bases.key)
        spec, found = (
            joined(text, pictures, depth)
            for text, pictures in ((words.spec, end.spec), (words.found, end.found))
        )
        report = end.report | {"text": {"scheme": name} | words.report}
        return _End(end.bases, found, spec, report), words.bases
    found, spec = end.found, end.spec
    if words is not None:
        spec, found = with_pictures(words, spec), with_pictures(words, found)
    return _End(end.bases, found, spec, end.report | {"text": name}), None


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
