"""`duotone plan`: sequences in a memory budget, before running anything."""

from typing import Annotated, Any

import typer

from .card import MemoryOption, ReserveOption, WeightsOption, config_of, memory_of, show_card
from .common import (
    BitsOption,
    JsonOption,
    SchemeOption,
    megabytes,
    print_json,
    recommended_spec,
    scheme_spec,
    show_paths,
    user_errors,
)

DEFAULT_BUDGET = "30GB"
# Parts of a plan that few models have, in words.
OWN_PARTS = {"windows": "sliding windows", "states": "states", "pictures": "pictures"}


@user_errors
def command(
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--config",
            "-m",
            help="Folder, config.json or hub name; only its config is read. Or internvl2.5-8b, "
            "internvl2.5-26b. Default: the embedded duotone-tiny.",
            show_default=False,
        ),
    ] = None,
    scheme: SchemeOption = None,
    bits: BitsOption = None,
    visual_tokens: Annotated[int, typer.Option(min=0, help="Per sequence.")] = 3328,
    text_tokens: Annotated[int, typer.Option(min=0, help="Per sequence.")] = 128,
    new_tokens: Annotated[int, typer.Option(min=0, help="Per sequence.")] = 500,
    images: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of pictures that hold the visual tokens, or that cross layers attend to.",
        ),
    ] = 1,
    budget: Annotated[
        str | None,
        typer.Option(
            help="Memory for caches, e.g. 30GB or 24GiB.",
            show_default=f"{DEFAULT_BUDGET}, without --memory",
        ),
    ] = None,
    memory: MemoryOption = None,
    weights: WeightsOption = None,
    reserve: ReserveOption = None,
    json_output: JsonOption = False,
) -> None:
    """Compute how many sequences fit into a memory budget.

    16 bit next to a scheme. --budget is memory for caches alone; --memory is the whole card, of
    which weights and a reserve are taken off. How fast these sequences decode is measured by
    [bold]duotone bench generate --budget[/bold].

    [bold]Examples[/bold]

      duotone plan --model OpenGVLab/InternVL3-8B-hf --visual-tokens 3328 --budget 30GB

      duotone plan --model internvl2.5-8b --scheme minmax --budget 30GB

      duotone plan --model Qwen/Qwen2-VL-7B-Instruct --memory 24GB --weights mquant-w4a8

      duotone plan --scheme duotone --bits 2 --json
    """
    import duotone
    from duotone.planning.shapes import SHAPES

    spec = None if scheme is None else scheme_spec(scheme, bits)
    given = budget if budget or memory else DEFAULT_BUDGET
    of_card = memory_of(given, memory, weights, reserve)
    config = SHAPES.get(model or "") or config_of(model, memory is not None)
    if scheme is None:
        scheme, spec = recommended_spec(config, bits)
    plan = duotone.plan(
        config,
        spec,
        visual_tokens=visual_tokens,
        text_tokens=text_tokens,
        new_tokens=new_tokens,
        images=images,
        **of_card,
    )
    paths = _paths(config, spec)
    if json_output:
        found = {"scheme": scheme, "spec": spec.to_dict(), **plan.to_dict()}
        print_json({**found, "attention": paths})
    else:
        show_plan(plan, scheme)
        show_paths(paths)


def _paths(config_or_facts: Any, spec: Any) -> list[dict[str, Any]]:
    """Implementation per kind of tokens on an H200."""
    from duotone.hf.model.facts import ModelFacts, model_facts
    from duotone.planning.memory import attention_paths

    known = isinstance(config_or_facts, ModelFacts)
    return attention_paths(config_or_facts if known else model_facts(config_or_facts), spec)


def show_plan(plan: Any, scheme: str) -> None:
    """Print a plan as a table and, where there is a budget, the outcome in a sentence."""
    from rich.console import Console
    from rich.table import Table

    tokens = plan.visual_tokens + plan.text_tokens + plan.new_tokens
    table = Table(f"{tokens:,} tokens", "16 bit", scheme)
    sizes = map(megabytes, (plan.dense_equivalent_bytes, plan.bytes_per_sequence))
    table.add_row("cache per sequence", *sizes)
    for part in ("codes", "params", "dense"):
        table.add_row(f"  of it {part}", "", megabytes(getattr(plan, f"{part}_bytes")))
    for part, name in OWN_PARTS.items():
        if size := getattr(plan, f"{part}_bytes"):
            table.add_row(f"  of it {name}", "", megabytes(size))
    table.add_row("true bits per number", "16", f"{plan.bits_per_element:.3f}")
    console = Console()
    if plan.budget_bytes is None or plan.card is not None:
        console.print(table)
        _show_uncounted(plan, console)
        if plan.card is not None:
            show_card(plan, scheme)
        return
    budget = megabytes(plan.budget_bytes)
    table.add_row(f"sequences in {budget}", f"{plan.dense_max_batch:,}", f"{plan.max_batch:,}")
    console.print(table)
    _show_uncounted(plan, console)
    console.print(f"[bold]{_sentence(plan, budget)}[/]")


def _show_uncounted(plan: Any, console: Any) -> None:
    """Say what a cache holds next to all that is counted."""
    if plan.uncounted:
        console.print(f"Not counted: {plan.uncounted}.")


def _sentence(plan: Any, budget: str) -> str:
    """The outcome in plain words."""
    if not plan.max_batch:
        sizes = f"it takes {megabytes(plan.bytes_per_sequence)}"
        dense = f"{megabytes(plan.dense_equivalent_bytes)} in 16 bit"
        return f"Not one sequence fits into {budget}: {sizes}, {dense}."
    ratio = plan.dense_equivalent_bytes / plan.bytes_per_sequence
    fit = "1 sequence fits" if plan.max_batch == 1 else f"{plan.max_batch:,} sequences fit"
    before = f"{plan.dense_max_batch:,}" if plan.dense_max_batch else "none"
    return f"{fit} into {budget} instead of {before}: {ratio:.1f}x smaller caches."
