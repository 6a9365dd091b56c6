"""The parts of a model that are quantized one after another: blocks, projectors, the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from torch import nn

from duotone.weights.equivalences.module_map import Block, Stream, WeightMap, at
from duotone.weights.equivalences.online import RotatedInput
from duotone.weights.methods.observer import Linear
from duotone.weights.methods.quantize import linears_of
from duotone.weights.methods.recipe import Recipe
from duotone.weights.methods.rule import HEAD
from duotone.weights.modules.quant_linear import QuantLinear

LINEARS = (nn.Linear, RotatedInput, QuantLinear)
Part = Literal["vision", "projector", "language", "head"]


@dataclass(frozen=True)
class Unit:
    """A module whose linears are calibrated and quantized together.

    split: paths of linears, relative to the module, after an online transform of the MLP.
    block: None for a projector and for the head, which is its own only linear.
    """

    part: Part
    path: str
    split: frozenset[str] = frozenset()
    block: Block | None = None

    def linears(self, model: nn.Module) -> dict[str, Linear]:
        """{path relative to the module: linear}."""
        return linears_of(at(model, self.path))

    def whole(self, path: str) -> str:
        """The path in the model of one of `linears`."""
        return f"{self.path}.{path}" if path else self.path

    def role(self, path: str) -> str:
        """The role (`weights.methods.rule.ROLES`) of one of `linears`."""
        if self.block is None:
            return self.part
        whole, block = self.whole(path), self.block
        if whole in block.attention_inputs:
            return "attention_input"
        if whole in block.mlp_inputs:
            return "mlp_input"
        return "mlp_output" if whole == block.mlp_output else "attention_output"

    def recipes(self, model: nn.Module, recipe: Recipe) -> dict[str, Recipe]:
        """{path relative to the module: its own recipe} of the linears that are quantized."""
        found = {
            path: recipe.of(self.whole(path), self.role(path), self.part)
            for path in self.linears(model)
        }
        return {path: own for path, own in found.items() if own is not None}


def input_channels(model: nn.Module, units: Sequence[Unit]) -> set[int]:
    """Numbers of inputs of the units' linears."""
    return {linear.in_features for unit in units for linear in unit.linears(model).values()}


def units_of(model: nn.Module, found: WeightMap, parts: Sequence[str]) -> list[Unit]:
    """All units of these parts, in the order in which data flow through them."""
    vision = [unit for s in found.streams if s.name == "vision" for unit in _blocks(s, "vision")]
    language = found.stream("language")
    projectors = [Unit("projector", path) for path in _projectors(model, found, language)]
    units = [*vision, *projectors, *_blocks(language, "language"), Unit(HEAD, found.head)]
    return [unit for unit in units if unit.part in parts]


def _blocks(stream: Stream, part: Part) -> list[Unit]:
    return [_block(block, part) for block in stream.blocks]


def _block(block: Block, part: Part) -> Unit:
    linears = (*block.attention_inputs, block.attention_output, *block.mlp_inputs, block.mlp_output)
    path = _common(linears)
    return Unit(part, path, frozenset({block.mlp_output.removeprefix(f"{path}.")}), block)


def _common(paths: Sequence[str]) -> str:
    """The longest path that contains all of these."""
    parents = [path.split(".")[:-1] for path in paths]
    shared = takewhile(lambda names: len(set(names)) == 1, zip(*parents, strict=False))
    return ".".join(names[0] for names in shared)


def _projectors(model: nn.Module, found: WeightMap, language: Stream) -> list[str]:
    """Modules with the linears between the two streams, in the order of the streams' readers."""
    vision = [stream for stream in found.streams if stream.name == "vision"]
    reading = [path for s in vision for reader in s.readers for path in reader.linears]
    paths = [p for p in (*reading, *language.writers) if isinstance(at(model, p), LINEARS)]
    inside = [_common((path,)) for path in paths if not _holds_blocks(_common((path,)), found)]
    return list(dict.fromkeys(inside))


def _holds_blocks(path: str, found: WeightMap) -> bool:
    blocks = [block.mlp_output for stream in found.streams for block in stream.blocks]
    return any(inner.startswith(f"{path}.") for inner in blocks)
