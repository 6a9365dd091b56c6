"""`duotone plan`: sequences in a memory budget, before running anything."""

import re
from typing import Annotated, Any

import typer

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

_UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
# Fewer bytes mean a forgotten unit: not even one token of most models fits.
_LEAST_BARE_BYTES = 1e6
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str) -> int:
    """'30GB' -> 30_000_000_000, '24GiB' -> 24 * 2**30; bare numbers are bytes, from 1 MB on."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match and _UNITS.get(match[2].upper() or "B")
    if not unit or float(match[1]) <= 0:
        raise ValueError(
            f"a budget must be a positive number with B, kB, MB, GB, TB or KiB..TiB, got {text!r}; "
            "write e.g. 30GB"
        )
    if not match[2] and float(match[1]) < _LEAST_BARE_BYTES:
        raise ValueError(
            f"a budget without a unit is in bytes and must be at least {_LEAST_BARE_BYTES:,.0f}, "
            f"got {text!r}; write {match[1]}GB, or {match[1]}B if bytes are meant"
        )
    return int(float(match[1]) * unit)


def _config(model: str | None) -> Any:
    from duotone.loading import load_config

    return load_config(model)


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
        int, typer.Option(min=1, help="Number of pictures that hold the visual tokens.")
    ] = 1,
    budget: Annotated[str, typer.Option(help="Memory for caches, e.g. 30GB or 24GiB.")] = "30GB",
    json_output: JsonOption = False,
) -> None:
    """Compute how many sequences fit into a memory budget.

    16 bit next to a scheme; weights and activations are outside the budget. How fast these
    sequences decode is measured by [bold]duotone bench generate --budget[/bold].

    [bold]Examples[/bold]

      duotone plan --model OpenGVLab/InternVL3-8B-hf --visual-tokens 3328 --budget 30GB

      duotone plan --model internvl2.5-8b --scheme minmax --budget 30GB

      duotone plan --scheme duotone --bits 2 --json
    """
    import duotone
    from duotone.planning.shapes import SHAPES

    spec = None if scheme is None else scheme_spec(scheme, bits)
    budget_bytes = parse_bytes(budget)
    config = SHAPES.get(model or "") or _config(model)
    if scheme is None:
        scheme, spec = recommended_spec(config, bits)
    plan = duotone.plan(
        config,
        spec,
        visual_tokens=visual_tokens,
        text_tokens=text_tokens,
        new_tokens=new_tokens,
        images=images,
        budget_bytes=budget_bytes,
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
    packed = plan.codes_bytes + plan.params_bytes + plan.dense_bytes
    if windows := plan.bytes_per_sequence - packed:
        table.add_row("  of it sliding windows", "", megabytes(windows))
    table.add_row("true bits per number", "16", f"{plan.bits_per_element:.3f}")
    console = Console()
    if plan.budget_bytes is None:
        console.print(table)
        return
    budget = megabytes(plan.budget_bytes)
    table.add_row(f"sequences in {budget}", f"{plan.dense_max_batch:,}", f"{plan.max_batch:,}")
    console.print(table)
    console.print(f"[bold]{_sentence(plan, budget)}[/]")


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
