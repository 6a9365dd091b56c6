"""The equivalences of `duotone.weights` on a transformers model: one call, the same function."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from duotone.hf.weights.checkpoint import check_not_quantized
from duotone.hf.weights.weight_maps import weight_map
from duotone.weights.equivalences.hadamard import plan_hadamard
from duotone.weights.equivalences.module_map import Block, Stream, WeightMap, at
from duotone.weights.equivalences.norms import norm_parts
from duotone.weights.equivalences.online import (
    is_rotated,
    rotate_input,
    rotate_values,
)
from duotone.weights.equivalences.residual import rotate_branch_inputs, rotate_stream
from duotone.weights.equivalences.rotation import untie
from duotone.weights.methods.recipe import Recipe


@dataclass(frozen=True)
class Equivalences:
    """Equivalences to apply.

    stream: fold norms and turn residual streams. values: turn V's heads. mlp_output: online
    Hadamard at down_proj / fc2. attention_output: one at o_proj, over all heads. pad: they may pad
    with zeros.
    """

    stream: bool = True
    values: bool = True
    attention_output: bool = False
    mlp_output: bool = True
    pad: bool = True
    seed: int = 0


def equivalences_of(recipe: Recipe) -> Equivalences:
    """Equivalences that a recipe applies before its linears are quantized."""
    return Equivalences(
        stream=recipe.rotation,
        values=recipe.rotation and not recipe.online_attention,
        attention_output=recipe.online_attention,
        mlp_output=recipe.online != "none",
        pad=recipe.pad,
        seed=recipe.seed,
    )


@torch.no_grad()
def apply_equivalences(model: PreTrainedModel, chosen: Equivalences | None = None) -> WeightMap:
    """Rotate every stream of `model` in place; it computes the same function.

    Everything is checked before a weight is touched. Errors: ValueError for an unknown family, a
    model that is transformed already, a size that no allowed transform covers.
    """
    chosen = chosen or Equivalences()
    if is_rotated(model):
        raise ValueError("this model is rotated already; load it again to transform it anew.")
    check_not_quantized(model)
    found = weight_map(model)
    check_sizes(model, found, chosen)
    if chosen.stream:
        check_norms(model, found)
    untie_head(model, found)
    for stream in found.streams:
        _apply(model, stream, chosen)
    return found


def untie_head(model: PreTrainedModel, found: WeightMap) -> None:
    """Give the head its own weight, in the configuration as well."""
    if untie(at(model, found.embedding), at(model, found.head)):
        for config in (model.config, model.config.get_text_config(decoder=True)):
            config.tie_word_embeddings = False


def check_norms(model: nn.Module, found: WeightMap) -> None:
    """Take every norm apart once. Errors: ValueError that names one of no known kind."""
    for stream in found.streams:
        branches = [branch for block in stream.blocks for branch in block.branches]
        norms = [path for b in branches for path in (b.norm, b.output_norm)]
        for path in (*norms, *(r.norm for r in stream.readers), stream.entry_norm):
            if path is not None:
                _check_norm(model, path)


def _check_norm(model: nn.Module, path: str) -> None:
    try:
        norm_parts(at(model, path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def check_sizes(model: PreTrainedModel, found: WeightMap, chosen: Equivalences) -> None:
    """Plan every transform once. Errors: ValueError for a size that no allowed one covers."""
    for stream in found.streams:
        _check_stream(model, stream, chosen)


def _check_stream(model: PreTrainedModel, stream: Stream, chosen: Equivalences) -> None:
    if chosen.stream and not stream.is_rotatable:
        plan_hadamard(stream.channels, pad=False)
    for block in stream.blocks:
        for path in _transformed(block, chosen):
            plan_hadamard(at(model, path).in_features, chosen.pad)


def _transformed(block: Block, chosen: Equivalences) -> list[str]:
    """Paths of the linears of a block whose inputs get an online Hadamard."""
    found = [block.attention_output] if chosen.attention_output else []
    return [*found, block.mlp_output] if chosen.mlp_output else found


def _apply(model: PreTrainedModel, stream: Stream, chosen: Equivalences) -> None:
    if chosen.stream and stream.is_rotatable:
        rotate_stream(model, stream, seed=chosen.seed)
    elif chosen.stream:
        rotate_branch_inputs(model, stream)
    for block in stream.blocks:
        if chosen.values:
            rotate_values(model, block)
        for path in _transformed(block, chosen):
            rotate_input(model, path, chosen.pad)
