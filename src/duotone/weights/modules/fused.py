"""Modules that make the int8 input of quantized linears once, in the launch before the linears.

    norm -> codes -> q, k, v          CodedNorm: its output is the codes, [..., columns] int8
    gate, up -> codes -> down         FusedMLP: activation * up, Hadamard, codes in one or two;
                                      on Hopper gate, up, activation * up in one, then the rest

A producer hands its codes to each reader (`QuantLinear.handed`), which takes them at its next call
and refuses integers that were not handed over. A checkpoint does not store the fusion. A fused
module has the tensors of the module that it replaces, under the same names, and gives that module
back.

On a CPU, and with impl="reference", the original norms and activation functions run: the codes
equal the unfused model's, bit by bit. Kernels do not round between their steps. So a code may
differ by one where the unfused model's 16-bit intermediate was rounded across the boundary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duotone.weights.modules import gated
from duotone.weights.modules.encode import Coded
from duotone.weights.modules.gate import Gate
from duotone.weights.modules.outside_graphs import outside_graphs
from duotone.weights.modules.quant_linear import QuantLinear
from duotone.weights.modules.quantize_rows import (
    ACTIVATIONS,
    activate,
    norm_quantize,
    normalized,
    takes_kernels,
)

# Largest differences of values that count as the same function: gelu's two forms differ by 5e-4;
# 16-bit norms round twice.
_SAME_ACTIVATION, _SAME_NORM = 1e-5, 0.03


class Fused(nn.Module):
    """Replacement of `original`, with its parameters, buffers and children."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # The same dictionaries: moving or loading the tensors of one does it for both. In a
        # tuple the original is no child.
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = original.__dict__[name]
        self._original = (original,)

    @property
    def original(self) -> nn.Module:
        """The replaced module, with the current tensors."""
        return self._original[0]

    def extra_repr(self) -> str:
        """Name the replaced module."""
        return f"in place of {type(self.original).__name__}"


class CodedNorm(Fused):
    """norm(x) as the codes of its readers, which agree on how they are made (`agree`).

    kind, eps: as `norm_kind` finds.
    """

    def __init__(
        self, norm: nn.Module, readers: Sequence[QuantLinear], kind: str, eps: float
    ) -> None:
        super().__init__(norm)
        self._readers, self._kind, self._eps = tuple(readers), kind, eps

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] -> int8 [..., columns], handed to all readers."""
        coded = self.encode(x)
        for reader in self._readers:
            reader.handed = coded
        return coded.codes.unflatten(0, x.shape[:-1])

    def encode(self, x: Tensor) -> Coded:
        """The codes of x [..., channels]."""
        lead = self._readers[0]
        rows = x.flatten(0, -2)
        if lead.plan is not None or not takes_kernels(lead.impl, rows):
            return lead.encode(self.original(x))
        weight, bias = getattr(self, "weight", None), getattr(self, "bias", None)
        given = {"weight": weight, "bias": bias, "kind": self._kind, "impl": lead.impl}
        codes, scale = norm_quantize(rows, lead.row_scale(), eps=self._eps, **given)
        missing = lead.columns - codes.shape[1]
        return Coded(F.pad(codes, (0, missing)) if missing else codes, scale, None, x.dtype)


class FusedMLP(Fused):
    """output(act(gate(x)) * up(x)), or without a gate output(act(input(x))).

    inputs: names of the children that make gate and up, a single one for both or without a gate.
    kind: the activation function, of `quantize_rows.ACTIVATIONS`; act: the child that is it.
    """

    def __init__(
        self,
        mlp: nn.Module,
        inputs: Sequence[str],
        output: str,
        act: str,
        kind: str,
        is_gated: bool,
    ) -> None:
        super().__init__(mlp)
        self._inputs, self._output = tuple(inputs), output
        self._act, self._kind, self._gated = act, kind, is_gated
        # Gate and up read the same codes.
        self._agree = is_gated and agree(self._readers)

    @property
    def _readers(self) -> list[nn.Module]:
        return [getattr(self, name) for name in self._inputs]

    @outside_graphs
    def forward(self, x: Tensor) -> Tensor:
        """[..., channels] -> the same."""
        output, together = getattr(self, self._output), self._in_one(x)
        if together is not None:
            return output.product(output.encode(together)).unflatten(0, x.shape[:-1])
        gate, up = self._halves([reader(x) for reader in self._readers])
        if takes_kernels(output.impl, gate):
            y = output.product(output.encode(gate, self._kind, up))
            return y.unflatten(0, gate.shape[:-1])
        activated = getattr(self, self._act)(gate)
        return output(activated if up is None else activated * up)

    def _in_one(self, x: Tensor) -> Tensor | None:
        """act(gate(x)) * up(x) [rows, channels] in one launch, where that can be and pays.

        Not where hooks are set.
        """
        if not self._agree:
            return None
        readers, output = self._readers, getattr(self, self._output)
        hooked = any(reader._forward_hooks or reader._forward_pre_hooks for reader in readers)
        if hooked or any(linear.impl != "auto" for linear in (*readers, output)):
            return None
        gate = _gate_of(readers, self._kind)
        if not gated.pays(x.shape[:-1].numel(), gate):
            return None
        # Floating point is encoded once; codes that were handed over are taken from all readers.
        coded, *_ = [r.coded(x) for r in (readers[:1] if x.is_floating_point() else readers)]
        return gated.gated_product(coded.codes, coded.scale, gate, dtype=coded.dtype)

    def _halves(self, made: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
        if not self._gated:
            return made[0], None
        gate, up = made if len(made) == 2 else made[0].chunk(2, -1)
        return gate, up


def _gate_of(readers: Sequence[QuantLinear], activation: str) -> Gate:
    """Linears that make gate and up, or both in one."""
    if len(readers) == 1:
        return Gate.halves(readers[0].packed, activation, readers[0].bias)
    gate, up = readers
    return Gate(gate.packed, up.packed, activation, gate.bias, up.bias)


@torch.no_grad()
def norm_kind(norm: nn.Module, channels: int) -> tuple[str, float] | None:
    """("rms" or "layer", eps) of a norm over the last dimension, found by its values; else None."""
    eps = next((getattr(norm, n) for n in ("eps", "variance_epsilon") if hasattr(norm, n)), None)
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if eps is None:
        return None
    wave = torch.arange(channels, device=None if weight is None else weight.device).sin() + 0.5
    # Of the second row eps is a part.
    x = torch.stack((wave, wave * eps**0.5)).to(torch.float32 if weight is None else weight.dtype)
    found = norm(x).float()
    for kind in ("rms", "layer"):
        wanted = normalized(x, eps, weight, bias, kind)
        if (wanted - found).norm() <= _SAME_NORM * found.norm():
            return kind, eps
    return None


@torch.no_grad()
def activation_kind(function: nn.Module) -> str | None:
    """Name among `quantize_rows.ACTIVATIONS`, found by the module's values; else None."""
    x = torch.linspace(-6, 6, 97)
    found = function(x)
    return next((k for k in ACTIVATIONS[1:] if _near(activate(x, k), found)), None)


def _near(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() < _SAME_ACTIVATION)


def agree(readers: Sequence[nn.Module]) -> bool:
    """True if one tensor of codes can serve all readers; compares scales (synchronises)."""
    if not readers or not all(isinstance(reader, QuantLinear) for reader in readers):
        return False
    first, *others = readers
    alone = first.activation != "none" and first.weight_w0 is None
    return alone and all(_alike(first, other) for other in others)


def _alike(one: QuantLinear, other: QuantLinear) -> bool:
    names = ("activation", "plan", "columns", "in_features", "modality", "impl")
    if any(getattr(one, name) != getattr(other, name) for name in names):
        return False
    if other.weight_w0 is not None:
        return False
    return one.scales is None or torch.equal(one.scales, other.scales)
