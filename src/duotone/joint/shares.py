"""Shares of one memory: bytes of each recipe's weights, and of the caches beside these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import duotone
from duotone.hf.model.facts import ModelFacts
from duotone.hf.model.support import attends_across
from duotone.hf.recommended import Usual
from duotone.inference.batch import visual_of
from duotone.planning.card import weight_bytes
from duotone.planning.memory import Plan, plan
from duotone.quant import CacheSpec

from .settings import JointSettings

DENSE = duotone.scheme("dense")


@dataclass(frozen=True)
class Share:
    """Memory beside one recipe's weights.

    caches_bytes: for all sequences. bits: true bits per number of K and V that these are. is_dense:
    16-bit caches fit. why: reason against the recipe, or "".
    """

    recipe: str
    weights_bytes: int = 0
    caches_bytes: int = 0
    bits: float = 0.0
    is_dense: bool = False
    why: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe fields."""
        return asdict(self)


@dataclass(frozen=True)
class Load:
    """Sequences to hold at once, all alike."""

    facts: ModelFacts
    sequences: int
    usual: Usual

    def plan(self, spec: CacheSpec) -> Plan:
        """Predict one sequence's cache."""
        return plan(self.facts, spec, **vars(self.usual))

    def caches_bytes(self, spec: CacheSpec) -> int:
        """Bytes of all sequences' caches."""
        return self.sequences * self.plan(spec).bytes_per_sequence

    def share(self, recipe: str, weights_bytes: int, left: int) -> Share:
        """Divide what weights leave. left: bytes for caches, which may be below 0."""
        dense = self.plan(DENSE)
        if dense.uncounted:
            raise ValueError(
                "a search under all memory needs the bytes of whole caches; got "
                f"{dense.uncounted}. Give memory for K and V alone: --budget-bits or --budget-bytes"
            )
        own = dense.bytes_per_sequence - dense.dense_bytes
        packed = left / self.sequences - own
        if packed <= 0:
            return Share(recipe, weights_bytes, why="its weights leave no memory for caches")
        bits = 8 * packed / (self.usual.tokens * self.facts.elements)
        fits = left >= self.sequences * dense.bytes_per_sequence
        return Share(recipe, weights_bytes, left, bits, fits)


def shares(model: Any, load: Load, settings: JointSettings) -> list[Share]:
    """A share per recipe. model: as it is; a recipe that does not fit it is left out with why."""
    made = []
    for recipe in settings.weights:
        try:
            count = weight_bytes(model, recipe)
        except ValueError as error:
            made.append(Share(recipe, why=str(error)))
            continue
        left = settings.memory_bytes - settings.reserve - count
        made.append(load.share(recipe, count, left))
    return made


def usual_of(encoded: Sequence[dict[str, Tensor]], config: Any, new: int, tokens: int) -> Usual:
    """A sequence of `tokens` tokens in the samples' proportions. new: tokens of an answer.

    Of pictures next to the tokens it has as many as the samples have at most.
    """
    masks = [visual_of(config, batch) for batch in encoded]
    visual = sum(int(mask.sum()) for mask in masks)
    runs = sum(map(_runs, masks))
    real = sum(int(batch["attention_mask"].sum()) for batch in encoded)
    answers = new * sum(len(batch["attention_mask"]) for batch in encoded)
    part = tokens / (real + answers)
    if attends_across(config):
        return Usual(0, tokens - round(answers * part), round(answers * part), _pictures(encoded))
    of_pictures, of_answers = round(visual * part), round(answers * part)
    images = min(max(1, of_pictures), max(1, round(runs * part)))
    return Usual(of_pictures, tokens - of_pictures - of_answers, of_answers, images)


def _pictures(encoded: Sequence[dict[str, Tensor]]) -> int:
    """Pictures of each sequence of a model that attends across: all are filled up to the most."""
    pixels = [one["pixel_values"] for one in encoded if "pixel_values" in one]
    return max((x.shape[1] for x in pixels), default=0)


def _runs(visual: Tensor) -> int:
    """Runs of visual tokens in a batch."""
    before = torch.nn.functional.pad(visual, (1, 0))[:, :-1]
    return int((visual & ~before).sum())
