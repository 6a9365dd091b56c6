"""AWQ's scales in one unit: observe its inputs, search, fold (`duotone.weights.methods.awq`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from duotone.hf.weights.units import Unit
from duotone.weights.equivalences.module_map import at
from duotone.weights.methods.awq import Pair, pairs_of, search
from duotone.weights.methods.observer import Observer, Wanted
from duotone.weights.methods.recipe import Recipe
from duotone.weights.methods.smooth import fold

from .running import Runs, observe


@dataclass
class Scaled:
    """Result of scaling a unit.

    lines: {path of a linear: its line of the report}. tensors: {name in the model: parameter} of
    norms and 16-bit linears that took factors; other linears are quantized next and stored by
    themselves.
    """

    lines: dict[str, dict[str, Any]] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)


def scale_unit(runs: Runs, unit: Unit, recipe: Recipe) -> Scaled:
    """Search and fold the scales of a unit's linears; its function stays.

    One pass serves all pairs: a pair moves factors from its source to its readers, so that no other
    pair's input changes. Readers of one pair take the bits of the first that is quantized.
    """
    made = Scaled()
    if unit.block is None:
        return made
    recipes = {unit.whole(p): own for p, own in unit.recipes(runs.model, recipe).items()}
    pairs = [p for p in pairs_of(runs.model, unit.block) if any(r in recipes for r in p.readers)]
    if not pairs:
        return made
    readers = {pair.readers[0]: at(runs.model, pair.readers[0]) for pair in pairs}
    wanted = Wanted(moments=True, absolute=True)
    observer = Observer(readers, wanted, impl=runs.impl)
    observe(runs, observer, unit.part, unit.path)
    for pair in pairs:
        own = next(recipes[reader] for reader in pair.readers if reader in recipes)
        _scale(runs, pair, observer, own, made)
        for path in {pair.source, *pair.readers} - set(recipes):
            parameters = at(runs.model, path).named_parameters()
            made.tensors |= {f"{path}.{name}": p.data for name, p in parameters}
    return made


def _scale(runs: Runs, pair: Pair, observer: Observer, recipe: Recipe, made: Scaled) -> None:
    seen, source = observer.of(pair.readers[0]), at(runs.model, pair.source)
    linears = [at(runs.model, path) for path in pair.readers]
    weights = [linear.weight for linear in linears]
    found = search(weights, seen.moments, seen.average, recipe.bits, recipe.group)
    fold(source, linears, found.factors, pair.rows)
    line = {"alpha": found.alpha, "error": found.error, "error_rtn": found.error_rtn}
    made.lines |= dict.fromkeys(pair.readers, line)
