"""`duotone compare`: 16-bit and few-bit answers side by side."""

from collections.abc import Sequence
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
    recommended_spec,
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
    scheme: SchemeOption = None,
    bits: BitsOption = None,
    beside: Annotated[
        str | None,
        typer.Option(
            help="Another scheme, whose answers and numbers are shown next to the first's."
        ),
    ] = None,
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

      duotone compare --scheme duotone-klt --beside calibquant --later-question

      duotone compare --scheme calibquant --bits 2 --json > result.json
    """
    from duotone.inference import compare as comparing
    from duotone.inference.batch import encode

    first = None if scheme is None else scheme_spec(scheme, bits)
    other = None if beside is None else _other_spec(scheme, beside)
    if question and not image:
        raise ValueError(
            "--question needs a picture to ask about, got none; add --image FILE, or leave both "
            "out for the bundled pictures"
        )
    chosen = comparing.prompts_of(image, question or []) if image else comparing.bundled_prompts()
    conversations = [prompt.messages() for prompt in chosen]
    loaded = load_model(model, device)
    if scheme is None:
        scheme, first = recommended_spec(loaded.model, bits)
        other = None if beside is None else _other_spec(scheme, beside)
    specs = {scheme: first} if beside is None else {scheme: first, beside: other}
    for spec in specs.values():
        comparing.check_scheme_fits(loaded, spec, has_images=True)
    encoded = encode(loaded.processor, conversations[:1])
    counts = token_counts(loaded.model, encoded, max_new_tokens)
    with (
        progress_bar("answering") as progress,
        explained_out_of_memory(loaded.model, specs[scheme], counts),
    ):
        outcomes = comparing.compare(
            loaded, chosen, specs, max_new_tokens, progress, later_question=later_question
        )
    if json_output:
        others = {"beside": outcomes[1].to_dict()} if beside is not None else {}
        print_json(outcomes[0].to_dict() | others)
    else:
        _show(outcomes)


def _other_spec(scheme: str | None, beside: str) -> Any:
    """The spec of --beside, at its own bits."""
    if beside == scheme:
        raise ValueError(f"--beside must name another scheme than --scheme, got {beside!r} twice")
    return scheme_spec(beside, None)


def _marked(answer: str, reference: str) -> Any:
    """The answer, with words that the reference lacks in yellow."""
    from rich.text import Text

    words = answer.split()
    matcher = SequenceMatcher(a=reference.split(), b=words, autojunk=False)
    text = Text()
    for operation, _, _, start, end in matcher.get_opcodes():
        style = "" if operation == "equal" else "yellow"
        text.append("".join(f"{word} " for word in words[start:end]), style=style)
    return text


def _answers_table(outcomes: Sequence[Any]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    first, names = outcomes[0], " and ".join(outcome.scheme for outcome in outcomes)
    table = Table(title=f"{first.model}: 16-bit cache and {names}", title_justify="left")
    headers = [("picture", "cyan"), ("question", ""), ("16-bit answer", "")]
    headers += [(_answers_header(outcome, outcomes), "") for outcome in outcomes]
    for header, style in headers:
        table.add_column(header, style=style, overflow="fold")
    rows = zip(*(outcome.answers for outcome in outcomes), strict=True)
    for picture, group in groupby(rows, key=lambda row: row[0].picture):
        for name, row in zip(chain([picture], repeat("")), group, strict=False):
            texts = map(escape, (name, row[0].question, row[0].reference))
            table.add_row(*texts, *map(_cell, row))
        table.add_section()
    return table


def _answers_header(outcome: Any, outcomes: Sequence[Any]) -> str:
    name = "" if len(outcomes) == 1 else f"{outcome.scheme}\n"
    return f"{name}{outcome.bits:.2g}-bit answer"


def _cell(answer: Any) -> Any:
    """The answer, unless it equals the 16-bit answer."""
    return "[green]the same[/]" if answer.same else _marked(answer.answer, answer.reference)


def _on(device: str) -> str:
    """Name the device of a time: only CUDA runs the kernels."""
    return "" if device == "cuda" else f" ({device}, no kernels)"


def _times(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.1f} ms"


def _summary_table(outcome: Any) -> Any:
    from rich.table import Table

    memory = outcome.memory
    table = Table("", "16 bit", f"{outcome.scheme}, {outcome.bits:.2g} bit", "ratio")
    visual = ("pictures' cache", "visual_bytes", "visual_dense_equivalent_bytes")
    # Where pictures are no separate spans, pictures are part of the whole, like text.
    parts = [visual] if memory["visual_bytes"] else []
    for name, part, dense in (*parts, ("whole cache", "total_bytes", "dense_equivalent_bytes")):
        ratio = outcome.ratio(part.removesuffix("_bytes"))
        table.add_row(name, megabytes(memory[dense]), megabytes(memory[part]), f"{ratio:.1f}x")
    for of, kind in (("visual number", "visual_bits"), ("number", "bits")):
        bits = memory[f"{kind}_per_element"]
        if bits:
            table.add_row(f"true bits per {of}", "16", f"{bits:.3f}", "")
    reference, quantized = outcome.reference_ms_per_token, outcome.ms_per_token
    table.add_row(f"time per token{_on(outcome.device)}", _times(reference), _times(quantized), "")
    agreement = f"{outcome.same_answers} of {len(outcome.answers)}"
    table.add_row("same answers", "", agreement, "")
    return table


def _show(outcomes: Sequence[Any]) -> None:
    from rich.console import Console

    console = Console()
    console.print(outcomes[0].asked(), markup=False)
    for outcome in outcomes:
        name = "" if len(outcomes) == 1 else f"{outcome.scheme}: "
        console.print(f"{name}{outcome.sentence()}", style="bold", markup=False)
    console.print(_answers_table(outcomes))
    for outcome in outcomes:
        console.print(_summary_table(outcome))
