"""All memory of a card: weights, a reserve, and the caches that fit into the rest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from duotone.hf.model.facts import ModelFacts
from duotone.hf.verdict import model_on_meta
from duotone.hf.weights.counted import recipe_bytes, tensor_bytes
from duotone.weights.methods.recipe import Recipe, get_recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Share of the memory that is kept free where no reserve is given. An assumption: activations,
# workspaces of kernels and the device's own context depend on batch, prompt and versions.
RESERVE_SHARE = 0.1
# Name of the weights that a checkpoint has.
AS_IT_IS = "none"


@dataclass(frozen=True)
class Weights:
    """One way to store the weights, and the sequences whose caches fit beside it.

    recipe: its name, or AS_IT_IS. weights_bytes: of all tensors; at most so many where numbers
    decide (MQuant's eq. 8). caches_bytes: what weights and reserve leave; 0 where they do not fit.
    max_batch, dense_max_batch: sequences, with the scheme and with 16-bit caches.
    """

    recipe: str
    weights_bytes: int
    caches_bytes: int
    max_batch: int
    dense_max_batch: int


@dataclass(frozen=True)
class Card:
    """Memory of a card, divided. rows: the checkpoint's own weights first, then the recipe's."""

    memory_bytes: int
    reserve_bytes: int
    reserve_is_assumed: bool
    rows: tuple[Weights, ...]

    @property
    def chosen(self) -> Weights:
        """The weights that the plan is of."""
        return self.rows[-1]


def check_memory(
    budget_bytes: int | None, memory_bytes: int | None, reserve_bytes: int | None, weights: Any
) -> None:
    """Raise ValueError for sizes that are no bytes, or that exclude each other."""
    sizes = {"memory_bytes": memory_bytes, "reserve_bytes": reserve_bytes}
    for name, value in sizes.items():
        if value is not None and (not isinstance(value, int) or value < 0):
            raise ValueError(f"{name} must be an integer >= 0; got {value!r}.")
    if None not in (budget_bytes, memory_bytes):
        raise ValueError(
            "memory is given for caches alone (budget_bytes, --budget) or for all (memory_bytes, "
            "--memory); got both. Leave one out"
        )
    if memory_bytes is None and not (reserve_bytes is None and weights is None):
        raise ValueError(
            "weights and a reserve are parts of all memory, which is not given; add memory_bytes "
            "(--memory 24GB), or leave both out"
        )


def weight_bytes(
    model_or_config: PreTrainedModel | PreTrainedConfig, weights: str | Recipe | None = None
) -> int:
    """Bytes of a model's weights: as they are, or after `duotone quantize -r WEIGHTS`.

    A config is of a checkpoint in its own dtype, 16 bit where it names none.
    Errors: ValueError for a recipe that does not fit the model. For a config of a checkpoint that
    another library quantized: the config does not say its bytes.
    """
    model = _model_of(model_or_config)
    if weights in (None, AS_IT_IS):
        return tensor_bytes(model)
    recipe = weights if isinstance(weights, Recipe) else get_recipe(weights)
    return recipe_bytes(model, recipe)["total"]


def _model_of(model_or_config: Any) -> Any:
    """The model itself, or one without numbers."""
    if isinstance(model_or_config, ModelFacts):
        raise ValueError(
            f"{model_or_config.model_type!r} is the shape of a cache alone, without weights; give "
            "a model or its config, or memory for caches (budget_bytes, --budget)"
        )
    if hasattr(model_or_config, "state_dict"):
        return model_or_config
    config = model_or_config
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"weights are counted from a config's shapes; this {config.model_type!r} checkpoint is "
            "quantized by another library. Load the model and give it instead of its config, or "
            "subtract its files' bytes from the card and give memory for caches (budget_bytes, "
            "--budget)"
        )
    dtype = config.dtype or config.get_text_config(decoder=True).dtype or torch.bfloat16
    return model_on_meta(config).to(dtype)


def card_of(
    model_or_config: Any,
    weights: str | Recipe | None,
    memory_bytes: int,
    reserve_bytes: int | None,
    bytes_per_sequence: int,
    dense_bytes_per_sequence: int,
) -> Card:
    """Divide a card's memory, by the checkpoint's own weights and by the recipe's."""
    model = _model_of(model_or_config)
    assumed = reserve_bytes is None
    reserve = int(RESERVE_SHARE * memory_bytes) if assumed else reserve_bytes

    def row(recipe: str | Recipe | None) -> Weights:
        count = weight_bytes(model, recipe)
        left = max(0, memory_bytes - reserve - count)
        fitting = (left // bytes_per_sequence, left // dense_bytes_per_sequence)
        return Weights(_name(recipe), count, left, *fitting)

    wanted = [None] if weights in (None, AS_IT_IS) else [None, weights]
    return Card(memory_bytes, reserve, assumed, tuple(map(row, wanted)))


def _name(recipe: str | Recipe | None) -> str:
    if recipe is None:
        return AS_IT_IS
    return recipe if isinstance(recipe, str) else "recipe"
