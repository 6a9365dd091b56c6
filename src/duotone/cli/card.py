"""Options and tables of all memory of a card: weights, a reserve, and caches."""

import re
from typing import Annotated, Any

import typer

from .common import megabytes

_UNITS = {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
# Fewer bytes mean a forgotten unit: not even one token of most models fits.
_LEAST_BARE_BYTES = 1e6
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
MemoryOption = Annotated[
    str | None,
    typer.Option(
        help="All memory of the card, e.g. 24GB: weights and a reserve are taken off.",
        show_default="none",
    ),
]
WeightsOption = Annotated[
    str | None,
    typer.Option(
        help="Recipe of [bold]duotone quantize -r[/bold], or a .json file of one; with --memory.",
        show_default="as the checkpoint has them",
    ),
]
ReserveOption = Annotated[
    str | None,
    typer.Option(
        help="Memory for activations, workspaces and the device's context; with --memory.",
        show_default="a tenth of --memory",
    ),
]


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


def memory_of(
    budget: str | None, memory: str | None, weights: str | None, reserve: str | None
) -> dict[str, Any]:
    """Arguments of `duotone.plan` from these options.

    Errors: ValueError for sizes that are none, options that exclude each other, an unknown recipe.
    """
    from duotone.planning.card import check_memory
    from duotone.weights.methods.recipe import Recipe, get_recipe

    if weights is not None and weights.endswith(".json"):
        recipe: Any = Recipe.from_file(weights)
    else:
        recipe = weights
        if weights not in (None, "none"):
            get_recipe(weights)
    sizes = {"budget_bytes": budget, "memory_bytes": memory, "reserve_bytes": reserve}
    given = {name: None if text is None else parse_bytes(text) for name, text in sizes.items()}
    check_memory(**given, weights=recipe)
    return {**given, "weights": recipe}


def config_of(model: str | None, with_weights: bool) -> Any:
    """The config of a name; of a folder that `duotone quantize` wrote the model without tensors.

    with_weights: bytes of weights are asked for, which the config of such a folder does not say.
    """
    from duotone.hf.weights.checkpoint import is_quantized_folder, load_empty
    from duotone.loading import load_config

    if with_weights and model is not None and is_quantized_folder(model):
        return load_empty(model)
    return load_config(model)


def show_card(plan: Any, scheme: str) -> None:
    """Print the sequences that fit, by weights and by cache, and what was assumed."""
    from rich.console import Console
    from rich.table import Table

    card, console = plan.card, Console()
    title = f"sequences in {megabytes(card.memory_bytes)}"
    table = Table("weights", "bytes", "left for caches", "16-bit cache", scheme, title=title)
    for row in card.rows:
        sizes = map(megabytes, (row.weights_bytes, row.caches_bytes))
        table.add_row(row.recipe, *sizes, f"{row.dense_max_batch:,}", f"{row.max_batch:,}")
    console.print(table)
    said = "assumed, not measured; --reserve sets it" if card.reserve_is_assumed else "as given"
    console.print(
        f"Reserve for activations, workspaces and the device's context: "
        f"{megabytes(card.reserve_bytes)}, {said}.",
        soft_wrap=True,
    )
    console.print(f"[bold]{_sentence(card)}[/]", soft_wrap=True)


def _sentence(card: Any) -> str:
    """The outcome in plain words."""
    first, chosen = card.rows[0], card.chosen
    memory = megabytes(card.memory_bytes)
    if not chosen.caches_bytes:
        left = megabytes(max(0, card.memory_bytes - card.reserve_bytes))
        return f"Weights of {megabytes(chosen.weights_bytes)} do not fit into the {left} for them."
    if not chosen.max_batch:
        return f"Not one sequence fits into {memory}."
    fit = "1 sequence fits" if chosen.max_batch == 1 else f"{chosen.max_batch:,} sequences fit"
    before = f"{first.dense_max_batch:,}" if first.dense_max_batch else "none"
    return f"{fit} into {memory} instead of {before}."
