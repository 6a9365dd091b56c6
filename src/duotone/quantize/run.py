"""Quantization of a model by a recipe and calibration data, unit by unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from duotone.hf.model.fingerprint import fingerprint
from duotone.hf.weights.checkpoint import mark_quantized
from duotone.hf.weights.equivalences import (
    apply_equivalences,
    equivalences_of,
    untie_head,
)
from duotone.hf.weights.part_bytes import part_bytes
from duotone.hf.weights.quantizable import check
from duotone.hf.weights.units import Unit, units_of
from duotone.tools.resume import Unfinished, noted
from duotone.weights.equivalences.hadamard import transform_back
from duotone.weights.equivalences.module_map import WeightMap, at, put
from duotone.weights.equivalences.online import RotatedInput
from duotone.weights.equivalences.outlier_split import wants_split
from duotone.weights.methods.observer import Linear, Observer, Wanted
from duotone.weights.methods.quantize import quantize_linear, wanted_by
from duotone.weights.methods.recipe import Recipe
from duotone.weights.methods.rule import HEAD
from duotone.weights.methods.smooth import smooth
from duotone.weights.modules.modality import Modality

from .calibration import CalibrationSet
from .kept_units import identity, keep_unit, restore_unit, unfinished
from .running import Runs, observe
from .scaling import Scaled, scale_unit

Progress = Callable[[int, int], None]


def quantize_model(
    model: Any,
    recipe: Recipe,
    calibration: CalibrationSet,
    *,
    name: str | None = None,
    partial: str | Path | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
    finish: Callable[[], Any] | None = None,
    impl: str = "auto",
) -> dict[str, Any]:
    """Quantize `model` in place; the report, JSON-safe: a line per linear, bytes per part.

    Every unit's statistics are of a model whose earlier units are quantized. name: of the model,
    for the record. partial: a folder of finished units, which is removed at the end. After an
    interruption, a run with the same arguments goes on from this folder. finish: saves the
    complete model, called while `partial` still exists.
    progress: called with (units done, units in all). say: receives a sentence if this run goes on.
    impl: of the linears, now and afterwards: "auto" or "reference".
    Errors: ValueError, before the model runs, for

    - a model that is quantized already or in float64,
    - a family without a module map,
    - a size that no Hadamard matrix covers,
    - a rule that covers no linear of its parts, and a head that is no linear,
    - a model that cannot run reordered as the recipe requires,
    - another run's partial folder.
    """
    found = check(model, recipe)
    given = identity(model, recipe, calibration) if partial else {}
    kept = unfinished(Path(partial) if partial else None, given)
    before, base = part_bytes(model, found), fingerprint(model)
    modality = Modality()
    runs = Runs(model, calibration.batches, language_root(found), modality)
    found = _prepared(model, found, recipe, runs)
    if HEAD in recipe.parts:
        untie_head(model, found)
    units = units_of(model, found, recipe.parts)
    runs.impl = impl
    with noted(lambda: kept.note(sum(map(kept.has, range(len(units)))), len(units))):
        lines = _all_units(runs, units, recipe, kept, progress, say)
    header = _header(name, base, recipe, calibration)
    report = {**header, "bytes": {"before": before, "after": part_bytes(model, found)}}
    mark_quantized(model, modality, report)
    if finish:
        finish()
    kept.remove()
    return report | {"linears": lines}


def language_root(found: WeightMap) -> str:
    """The path of the language model."""
    return found.embedding.rsplit(".", 1)[0]


def _header(
    name: str | None, base: str, recipe: Recipe, calibration: CalibrationSet
) -> dict[str, Any]:
    from duotone.report.provenance import commit

    return {
        "recipe": recipe.to_dict(),
        "base": {"name": name, "fingerprint": base},
        "calibration": {"sources": calibration.sources, "hashes": calibration.hashes},
        "commit": commit(),
    }


def _prepared(model: Any, found: WeightMap, recipe: Recipe, runs: Runs) -> WeightMap:
    """The model with the recipe's equivalences, which keep its function."""
    if recipe.smooth is not None:
        _smooth(found, recipe, runs)
    if not recipe.rotation and not recipe.has_online:
        return found
    return apply_equivalences(model, equivalences_of(recipe))


def _smooth(found: WeightMap, recipe: Recipe, runs: Runs) -> None:
    """SmoothQuant on all norms of blocks, from one pass through the model."""
    branches = [
        (branch, "language" if stream.name == "language" else "vision")
        for stream in found.streams
        for block in stream.blocks
        for branch in block.branches
        if branch.norm is not None
    ]
    model = runs.model
    readers = {b.inputs[0]: at(model, b.inputs[0]) for b, part in branches if part in recipe.parts}
    observer = Observer(readers, Wanted(largest=True))
    with observer.watching():
        for rows in runs.through_language(language_root(found)):
            observer.rows = rows
    vision = {path: at(model, path) for path in readers if path not in observer.leader}
    seen = Observer(vision, Wanted(largest=True))
    with seen.watching():
        for rows in runs.through_vision(language_root(found)) if vision else ():
            seen.rows = rows
    for branch, part in branches:
        if part in recipe.parts:
            source = observer if branch.inputs[0] in observer.leader else seen
            largest = source.of(branch.inputs[0]).largest
            linears = [at(model, path) for path in branch.inputs]
            smooth(at(model, branch.norm), linears, largest, recipe.smooth)
    runs.forget()


def _all_units(
    runs: Runs,
    units: Sequence[Unit],
    recipe: Recipe,
    kept: Unfinished,
    progress: Progress | None,
    say: Callable[[str], None] | None,
) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    restored = 0
    for number, unit in enumerate(units):
        done = restore_unit(kept, number, runs.model, runs.modality, runs.impl)
        if done is None:
            if restored == number and number and say:
                say(kept.going_on(number, len(units)))
            made, done, tensors = _quantized(runs, unit, recipe)
            keep_unit(kept, number, made, done, tensors)
        else:
            restored += 1
        lines += done
        if progress:
            progress(number + 1, len(units))
    return lines


def _split(
    unit: Unit, linears: Mapping[str, Linear], recipes: Mapping[str, Recipe]
) -> frozenset[str]:
    """Linears whose channel 0 stays floating point."""
    return frozenset(
        path
        for path in unit.split
        if path in recipes and _splits(linears[path], recipes[path].split)
    )


def _splits(module: Linear, split: str) -> bool:
    return split == "always" or (split == "eq8" and _eq8_holds(module))


def _eq8_holds(module: RotatedInput) -> bool:
    """True if eq. 8 holds for the weight before the transform."""
    weight = module.linear.weight.double()
    return wants_split(transform_back(weight, module.plan))


def _quantized(
    runs: Runs, unit: Unit, recipe: Recipe
) -> tuple[dict[str, nn.Module], list[dict[str, Any]], dict[str, Tensor]]:
    """Observe and replace the linears of one unit.

    ({path: module}, report, {name: tensor} of norms that changed).
    """
    scaled = scale_unit(runs, unit, recipe) if recipe.method == "awq" else Scaled()
    recipes = unit.recipes(runs.model, recipe)
    linears = {path: one for path, one in unit.linears(runs.model).items() if path in recipes}
    split = _split(unit, linears, recipes)
    made, lines = {}, []
    if not linears:
        return made, lines, scaled.tensors
    observer = Observer(linears, wanted_by(*recipes.values()), split, runs.impl)
    observe(runs, observer, unit.part, unit.path)
    for path, module in linears.items():
        whole, own = unit.whole(path), recipes[path]
        outcome = quantize_linear(
            module,
            observer.of(path),
            own,
            split=path in split,
            two_scales=own.modality_scales and unit.part == "language",
            modality=runs.modality,
        )
        outcome.linear.impl = runs.impl
        put(runs.model, whole, outcome.linear)
        made[whole] = outcome.linear
        extra = {"mode": outcome.linear.mode, **scaled.lines.get(whole, {})}
        lines.append({"linear": whole, "part": unit.part, **outcome.report, **extra})
    return made, lines, scaled.tensors
