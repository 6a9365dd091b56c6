"""`duotone compare`: the main job."""

from difflib import SequenceMatcher
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Annotated, Any

import typer

from .common import (
    BitsOption,
    DeviceOption,
    JsonOption,
    LaterOption,
    ModelOption,
    SchemeOption,
    TokensOption,
    load_model,
    megabytes,
    print_json,
    progress_bar,
    scheme_spec,
    user_errors,
)
from .memory import explained_out_of_memory, token_counts


@user_errors
def command(
    model: ModelOption = None,
    image: Annotated[
        list[Path] | None,
        typer.Option("--image", "-i", help="Picture; repeat for more.", show_default=False),
    ] = None,
    question: Annotated[
        list[str] | None,
        typer.Option("--question", "-q", help="Asked about every picture; repeat for more."),
    ] = None,
    scheme: SchemeOption = "duotone",
    bits: BitsOption = None,
    max_new_tokens: TokensOption = 64,
    later_question: LaterOption = False,
    device: DeviceOption = None,
    json_output: JsonOption = False,
) -> None:
    """Answer questions about pictures from a 16-bit and a few-bit cache, side by side.

    Without arguments: the embedded model and the bundled pictures, offline.

    [bold]Examples[/bold]

      duotone compare

      duotone compare --image cat.jpg --question "What is this?" --model OpenGVLab/InternVL3-1B-hf

      duotone compare --scheme calibquant --bits 2 --json > result.json
    """
    from duotone import compare as comparing
    from duotone.inference import encode

    spec = scheme_spec(scheme, bits)
    if question and not image:
        raise ValueError(
            "--question needs a picture to ask about, got none; add --image FILE, or leave both "
            "out for the bundled pictures"
        )
    chosen = comparing.prompts_of(image, question or []) if image else comparing.bundled_prompts()
    conversations = [prompt.messages() for prompt in chosen]
    loaded = load_model(model, device)
    comparing.check_scheme_fits(loaded, spec, has_images=True)
    encoded = encode(loaded.processor, conversations[:1])
    counts = token_counts(loaded.model, encoded, max_new_tokens)
    with (
        progress_bar("answering") as progress,
        explained_out_of_memory(loaded.model, spec, counts),
    ):
        outcome = comparing.compare(
            loaded,
            chosen,
            spec,
            scheme,
            max_new_tokens,
            progress,
            later_question=later_question,
        )
    if json_output:
        print_json(outcome.to_dict())
    else:
        _show(outcome)


def _marked(answer: str, reference: str) -> Any:
    """The answer with the words that the reference has not, in yellow."""
    from rich.text import Text

    words = answer.split()
    matcher = SequenceMatcher(a=reference.split(), b=words, autojunk=False)
    text = Text()
    for operation, _, _, start, end in matcher.get_opcodes():
        style = "" if operation == "equal" else "yellow"
        text.append("".join(f"{word} " for word in words[start:end]), style=style)
    return text


def _answers_table(outcome: Any) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"{outcome.model}: 16-bit cache and {outcome.scheme}", title_justify="left")
    few_bit = f"{outcome.bits:g}-bit answer"
    for header, style in (
        ("picture", "cyan"),
        ("question", ""),
        ("16-bit answer", ""),
        (few_bit, ""),
        ("same?", ""),
    ):
        table.add_column(header, style=style, overflow="fold")
    for picture, rows in groupby(outcome.answers, key=lambda row: row.picture):
        for name, row in zip(chain([picture], repeat("")), rows, strict=False):
            same = "[green]yes[/]" if row.same else "[yellow]no[/]"
            texts = map(escape, (name, row.question, row.reference))
            table.add_row(*texts, _marked(row.answer, row.reference), same)
        table.add_section()
    return table


def _times(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.1f} ms"


def _summary_table(outcome: Any) -> Any:
    from rich.table import Table

    memory = outcome.memory
    table = Table("", "16 bit", f"{outcome.bits:g} bit", "ratio")
    for name, part, dense in (
        ("pictures' cache", "visual_bytes", "visual_dense_equivalent_bytes"),
        ("whole cache", "total_bytes", "dense_equivalent_bytes"),
    ):
        ratio = outcome.ratio(part.removesuffix("_bytes"))
        table.add_row(name, megabytes(memory[dense]), megabytes(memory[part]), f"{ratio:.1f}x")
    visual_bits = f"{memory['visual_bits_per_element']:.3f}"
    table.add_row("true bits per visual number", "16", visual_bits, "")
    reference, quantized = outcome.reference_ms_per_token, outcome.ms_per_token
    table.add_row("time per token", _times(reference), _times(quantized), "")
    agreement = f"{outcome.same_answers} of {len(outcome.answers)}"
    table.add_row("same answers", "", agreement, "")
    return table


def _show(outcome: Any) -> None:
    from rich.console import Console

    console = Console()
    console.print(_answers_table(outcome))
    console.print(_summary_table(outcome))
    console.print(f"[bold]{outcome.sentence()}[/]")
