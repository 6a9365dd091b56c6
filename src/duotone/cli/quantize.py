"""`duotone quantize`: weights and activations of a whole model on 4 and 8 bits."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .common import (
    DeviceOption,
    JsonOption,
    ModelArgument,
    load_model,
    megabytes,
    print_json,
    progress_bar,
    say,
    user_errors,
)
from .samples import sampled_tasks

if TYPE_CHECKING:
    from duotone.weights.methods.recipe import Recipe

PARTIAL = ".partial"
FORMATS = ("duotone", "compressed-tensors")


@user_errors
def command(
    model: ModelArgument = None,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            "-r",
            help="mquant-w4a8, mquant-w8a8, awq-w4a8, ..., or a .json file of one.",
        ),
    ] = "mquant-w4a8",
    rule: Annotated[
        list[str] | None,
        typer.Option(
            "--rule",
            help="Other bits or activations for some linears: [PART/]LINEARS:FIELD=VALUE,... "
            "LINEARS is a path with * or a role: attention_input, attention_output, mlp_input, "
            "mlp_output, projector, head. Repeat for more; the later wins.",
            show_default="the recipe's",
        ),
    ] = None,
    calibration: Annotated[
        list[str] | None,
        typer.Option(
            "--calibration",
            "-c",
            help="captions, documents, ..., or a .jsonl file of your own; repeat for more.",
            show_default="the embedded tasks",
        ),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", "-n", help="Per task.")] = 32,
    out: Annotated[Path, typer.Option("--out", "-o", help="A new folder.")] = Path("quantized"),
    part: Annotated[
        list[str] | None,
        typer.Option(
            "--part",
            help="vision, projector, language, head; repeat for more. Other parts stay 16 bit.",
            show_default="the recipe's: mostly all but the head",
        ),
    ] = None,
    no_pad: Annotated[
        bool, typer.Option("--no-pad", help="Refuse sizes that need zeros for a Hadamard matrix.")
    ] = False,
    form: Annotated[
        str, typer.Option("--format", help="duotone, or compressed-tensors (as vLLM reads).")
    ] = FORMATS[0],
    batch_size: Annotated[int, typer.Option(min=1)] = 4,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Quantize vision tower, projector and language model; write a checkpoint that loads.

    MQuant: norms folded and streams rotated, two static int8 scales per linear of the language
    model (visual tokens, text), GPTQ weights. Calibration prompts run with their answers, so that
    the text's scales have seen generated tokens.

    After an interruption, the same command goes on with the current layer. Finished layers are kept
    in OUT.partial, which is removed at the end.

    [bold]Examples[/bold]

      duotone quantize -o tiny-w4a8

      duotone quantize OpenGVLab/InternVL3-1B-hf -c mine.jsonl -n 64 -r mquant-w4a8 -o w4a8

      duotone quantize Qwen/Qwen2-VL-7B-Instruct -c mine.jsonl -r w4a16-g128 --part language
      --format compressed-tensors -o w4a16

      duotone quantize -r mquant-w4a8 --rule vision/*:bits=8
      --rule language/mlp_output:activation=dynamic -o mixed

      duotone compare --model w4a8 --image photo.jpg -q "What is this?"
    """
    from duotone.hf.weights import checkpoint as quantized
    from duotone.hf.weights.compressed_tensors import check_expressible, export
    from duotone.hf.weights.quantizable import check
    from duotone.hf.weights.units import input_channels, units_of
    from duotone.quantize import calibration_set, quantize_model

    if form not in FORMATS:
        raise ValueError(f"--format must be one of {FORMATS}, got {form!r}")
    chosen = _chosen(recipe, rule or [], part, not no_pad)
    quantized.check_new_folder(out)
    if form != FORMATS[0]:
        check_expressible(chosen)
    tasks, _ = sampled_tasks(calibration, model, samples)
    loaded = load_model(model, device)
    found = check(loaded.model, chosen)
    if form != FORMATS[0]:
        units = units_of(loaded.model, found, chosen.parts)
        check_expressible(chosen, input_channels(loaded.model, units))
    data = calibration_set(loaded, tasks, samples, batch_size)
    write = quantized.save if form == FORMATS[0] else export
    with progress_bar("quantizing") as progress:
        report = quantize_model(
            loaded.model,
            chosen,
            data,
            name=loaded.name,
            partial=out.with_name(out.name + PARTIAL),
            progress=progress,
            finish=lambda: write(loaded.model, out, loaded.processor),
            say=say,
        )
    if json_output:
        print_json(report | {"folder": str(out)})
    else:
        _show(report, out, form)


def _chosen(name: str, rules: list[str], parts: list[str] | None, pad: bool) -> "Recipe":
    """The recipe of a name or a file, with what the command line changes."""
    from duotone.weights.methods.recipe import Recipe, get_recipe
    from duotone.weights.methods.rule import LinearRule

    found = Recipe.from_file(name) if name.endswith(".json") else get_recipe(name)
    made = (*found.rules, *map(LinearRule.from_text, rules))
    changed = found.replace(rules=made, pad=pad and found.pad)
    return changed.replace(parts=tuple(parts)) if parts else changed


def _show(report: dict[str, Any], out: Path, form: str) -> None:
    """Show bytes by part, and the use of the folder."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table("part", "before", "after", "share")
    before, after = report["bytes"]["before"], report["bytes"]["after"]
    for part, count in before.items():
        share = f"{after[part] / count:.0%}" if count else ""
        table.add_row(part, megabytes(count), megabytes(after[part]), share)
    console.print(table)
    console.print(f"Written: {out}", soft_wrap=True)
    if form == FORMATS[0]:
        console.print(f"Use it:  duotone compare --model {out}", soft_wrap=True)
