"""Let modules of a quantized model hand int8 codes to each other, and undo it.

A norm is fused whose only readers are quantized linears with the same scales: the module map says
who reads it. An MLP is fused whose children are its linears, an activation function that kernels
have, and nothing else that computes. What somebody listens to with a hook stays as it is, and so
do projectors: they run once per picture, and some read several normalised tokens as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from duotone.hf.weights.weight_maps import weight_map
from duotone.weights.equivalences.module_map import Block, at, put
from duotone.weights.modules.fused import (
    CodedNorm,
    Fused,
    FusedMLP,
    activation_kind,
    agree,
    norm_kind,
)
from duotone.weights.modules.quant_linear import QuantLinear

# Children of an MLP that do nothing when a model runs.
_IDLE = (nn.Dropout, nn.Identity)


def fuse(model: PreTrainedModel) -> list[str]:
    """Fuse what can be, in place; the paths of the fused modules. Quantized models come fused.

    To be called again when scales, `impl` or modules have changed: what is fused depends on them.
    Errors: ValueError for a family without a module map.
    """
    unfuse(model)
    made: dict[str, Fused | None] = {}
    for block in (block for stream in weight_map(model).streams for block in stream.blocks):
        for branch in block.branches:
            if branch.norm is not None:
                readers = [at(model, path) for path in branch.inputs]
                made[branch.norm] = _coded_norm(at(model, branch.norm), readers)
        path = block.mlp_output.rpartition(".")[0]
        made[path] = _fused_mlp(at(model, path), block, path)
    fused = {path: module for path, module in made.items() if module is not None}
    for path, module in fused.items():
        put(model, path, module)
    return list(fused)


def unfuse(model: nn.Module) -> None:
    """Every module by itself again, in place."""
    for path, module in list(model.named_modules()):
        if isinstance(module, Fused):
            put(model, path, module.original)
        elif isinstance(module, QuantLinear):
            module.handed = None


def is_fused(model: nn.Module) -> bool:
    """True if any module is fused."""
    return any(isinstance(module, Fused) for module in model.modules())


@contextmanager
def unfused(model: PreTrainedModel) -> Iterator[None]:
    """Inside, every module runs by itself: for comparisons."""
    before = is_fused(model)
    unfuse(model)
    try:
        yield
    finally:
        if before:
            fuse(model)


def _coded_norm(norm: nn.Module, readers: Sequence[nn.Module]) -> CodedNorm | None:
    if _is_heard(norm) or not agree(readers):
        return None
    kind = norm_kind(norm, readers[0].in_features)
    return None if kind is None else CodedNorm(norm, readers, *kind)


def _fused_mlp(mlp: nn.Module, block: Block, path: str) -> FusedMLP | None:
    paths = (*block.mlp_inputs, block.mlp_output)
    if _is_heard(mlp) or any(p.rpartition(".")[0] != path for p in paths):
        return None
    *inputs, output = (p.rpartition(".")[2] for p in paths)
    last = getattr(mlp, output)
    others = {
        name: child
        for name, child in mlp.named_children()
        if name not in (*inputs, output) and not isinstance(child, _IDLE)
    }
    if len(others) != 1 or not isinstance(last, QuantLinear) or last.activation == "none":
        return None
    ((act, function),) = others.items()
    kind = activation_kind(function)
    gated = block.up is not None
    return None if kind is None else FusedMLP(mlp, inputs, output, act, kind, gated)


def _is_heard(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
