"""Rows of `duotone bench generate`: ways to call `model.generate`, by name.

A name is a cache's, with what changes it after commas: `duotone@1, no graphs, rtn-w4a8`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

import duotone
from duotone.defaults import CONVERSATIONS, PICTURES, TEXT
from duotone.quant import CacheSpec
from duotone.weights import RECIPES

PLAIN, NO_CUDNN, STATIC = "plain", "plain, cuDNN off", "StaticCache, compiled"
# Specs as `duotone calibrate` makes them at one bit, and with text at two code bits beside it; they
# have random bases for the model at hand.
CALIBRATED, CALIBRATED_TEXT = "calibrated@1", "calibrated, text@2"
RANDOM_BASES = (CALIBRATED, CALIBRATED_TEXT)
STEP_BY_STEP = "no graphs"
RECIPE = "rtn-w4a8"
_VISUAL, _TEXT = (PICTURES, "calibquant@1", CONVERSATIONS, "kivi@2"), ("kivi@2", TEXT)
# What a compiled call leaves in a model; 5.17 keeps its static cache there, too.
_COMPILED = ("_compiled_call", "_last_compile_config", "_cache")


@dataclass(frozen=True)
class Row:
    """One way to call `generate`.

    spec: of `enable`, or None; of RANDOM_BASES it comes with the model. graphs: whether steps may
    be captured. recipe: name of a recipe that the weights are quantized by, or None.
    """

    name: str
    base: str
    spec: CacheSpec | None = None
    graphs: bool = True
    recipe: str | None = None

    @classmethod
    def parse(cls, name: str) -> Row:
        """Errors: ValueError for a name that is no row's."""
        base, recipe, graphs = name, None, True
        head, _, last = base.rpartition(", ")
        if head and last in RECIPES:
            base, recipe = head, last
        if base.endswith(f", {STEP_BY_STEP}"):
            base, graphs = base.removesuffix(f", {STEP_BY_STEP}"), False
        is_ours = base not in (PLAIN, NO_CUDNN, STATIC)
        if not (is_ours or graphs):
            raise ValueError(f"{STEP_BY_STEP!r} goes with a scheme; got --row {name!r}")
        known = is_ours and base not in RANDOM_BASES
        return cls(name, base, _spec(base, name) if known else None, graphs, recipe)

    def settings(self) -> dict[str, Any]:
        """Arguments of `generate` that make the row."""
        return {"cache_implementation": "static"} if self.base == STATIC else {}

    def enabled(
        self, model: Any, visual_mask: torch.Tensor | None = None
    ) -> AbstractContextManager[Any]:
        """Return a block of `enable`, or an empty one. Errors: ValueError for a spec that fails."""
        if self.spec is None:
            return nullcontext()
        return duotone.enable(model, self.spec, visual_mask=visual_mask, graphs=self.graphs)

    @contextmanager
    def block(self, model: Any, visual_mask: torch.Tensor | None = None) -> Iterator[Any]:
        """The block in which all calls of this row are made; gives the handle of `enable`."""
        was_on = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(was_on and self.base != NO_CUDNN)
        opened = None
        try:
            with self.enabled(model, visual_mask) as opened:
                yield opened
        finally:
            if opened is not None:  # captures would be another row's memory
                opened.free_graphs()
            torch.backends.cuda.enable_cudnn_sdp(was_on)
            if self.base == STATIC:
                _forget_compiled(model)


def parse_rows(names: Sequence[str]) -> list[Row]:
    """Rows in the order of measuring: those of quantized weights are last.

    Errors: ValueError for unknown rows, rows that are named twice, and several recipes.
    """
    rows = [Row.parse(name) for name in names]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"every --row and --spec is measured once; got {twice} twice")
    recipes = sorted({row.recipe for row in rows if row.recipe})
    if len(recipes) > 1:
        raise ValueError(
            f"weights are quantized once in a run; got the recipes {recipes}. Run it once for each."
        )
    return sorted(rows, key=lambda row: row.recipe is not None)


def rows_of_spec(name: str) -> list[str]:
    """Rows of a scheme or spec file: by graphs, and step by step."""
    return [name, f"{name}, {STEP_BY_STEP}"]


def default_rows(takes_images: bool) -> list[str]:
    """Names of the whole table."""
    first, *others = _VISUAL if takes_images else _TEXT
    ours = [*rows_of_spec(first), *others]
    coded = [f"{name}, {RECIPE}" for name in (PLAIN, first)]
    return [PLAIN, NO_CUDNN, STATIC, *ours, *coded]


def budget_rows(takes_images: bool) -> list[str]:
    """Names of the rows in a memory budget."""
    return [PLAIN, *((PICTURES, CALIBRATED, CONVERSATIONS) if takes_images else _TEXT)]


def _spec(base: str, name: str) -> CacheSpec:
    if base.endswith(".json"):
        return CacheSpec.from_file(base)
    scheme, at, bits = base.partition("@")
    if (at and not bits.isdecimal()) or "," in base:
        raise ValueError(
            f"--row must be {PLAIN!r}, {NO_CUDNN!r}, {STATIC!r}, {CALIBRATED}, "
            f"{CALIBRATED_TEXT!r}, a scheme as NAME@BITS, or a spec's .json file, with "
            f"', {STEP_BY_STEP}' and ', RECIPE' after it or not; got {name!r}. RECIPE is of "
            f"duotone quantize, e.g. {RECIPE}."
        )
    return duotone.scheme(scheme, bits=int(bits)) if at else duotone.scheme(scheme)


def _forget_compiled(model: Any) -> None:
    """Free what compiled calls hold; later rows would run beside it."""
    for name in _COMPILED:
        model.__dict__.pop(name, None)
    torch.compiler.reset()
