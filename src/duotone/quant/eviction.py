"""Eviction: tokens of the prompt that a cache drops before it stores the rest, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from duotone.quant.spec_base import Record, is_count, is_number, is_word, require

CHOICES = {
    "budget": ("uniform", "pyramid", "sparsity"),
    "judges": ("post-visual", "recent"),
    "which": ("all", "visual"),
}


@dataclass(frozen=True)
class Eviction(Record):
    """Drop tokens of the first prompt, per layer; the spec stores the tokens that stay.

    A token's score in a layer is the attention that it gets from some later tokens, the judges:

        S_j = sum_i w_i mean_h A_hij        over judges i and query heads h

    The best tokens stay. Only the first step is evicted: the papers compress once, after prefill.
    A prompt that is read in pieces loses tokens of its first piece only. Later turns and generated
    tokens stay.

    keep: share of the evictable tokens that stay, on average over the layers. 1/16 of the tokens
        in 16 bit takes the memory of 1 bit.
    budget: share of each layer: "uniform"; "pyramid" (less in deeper layers, PyramidInfer);
        "sparsity" (by the share of scores above 1 % of their row's maximum, VL-Cache). All
        layers' states are then held in 16 bit until the last layer of the prompt has run.
    judges: "post-visual", the tokens after the last visual one (VL-Cache), or "recent", the last
        `window` share of the prompt. Where no token follows a picture, or there is no picture,
        "post-visual" means "recent". At least one token is a judge.
    newest_weight: w_i of the newest judge; it falls linearly to 1 at the oldest.
    sink, recent: the first tokens (a count) and the last ones (a share of the layer's budget)
        always stay. Both are part of the budget.
    nested: a token that one layer drops is dropped in all deeper layers.
    which: "all" tokens may go, or "visual" ones only.
    """

    keep: float = 1 / 16
    budget: Literal["uniform", "pyramid", "sparsity"] = "uniform"
    judges: Literal["post-visual", "recent"] = "recent"
    window: float = 0.1
    newest_weight: float = 1.0
    sink: int = 0
    recent: float = 0.1
    nested: bool = False
    which: Literal["all", "visual"] = "all"

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)
            ok = is_word(value, choices)
            require(ok, f"{name} must be one of {choices}", value, "See Eviction.")
        for name in ("keep", "window"):
            value = getattr(self, name)
            ok = is_number(value) and 0 < value <= 1
            require(ok, f"{name} must lie in (0, 1]", value, "A share of the prompt's tokens.")
        ok = is_number(self.recent) and 0 <= self.recent <= 1
        require(ok, "Eviction.recent must lie in [0, 1]", self.recent, "A share of the budget.")
        ok = is_number(self.newest_weight) and self.newest_weight >= 1
        require(ok, "newest_weight must be >= 1", self.newest_weight, "1: all judges alike.")
        ok = is_count(self.sink)
        require(ok, "Eviction.sink must be an integer >= 0", self.sink, "In tokens.")
        require(isinstance(self.nested, bool), "nested must be a bool", self.nested, "")
        ok = not (self.nested and self.budget == "sparsity")
        remedy = "Budgets by sparsity may grow with depth: use uniform or pyramid."
        require(ok, "nested needs budgets that never grow", self.budget, remedy)
