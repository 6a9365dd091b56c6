"""Factors that a gated MLP multiplies before `down`: two weights and the activation between."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from duotone.weights.modules.packed_weight import PackedWeight
from duotone.weights.modules.quantize_rows import ACTIVATIONS


@dataclass(frozen=True)
class Gate:
    """activation(x * gate + gate_bias) * (x * up + up_bias).

    gate, up: [channels, in]. activation: of `quantize_rows.ACTIVATIONS`. Biases: [channels].
    Errors: ValueError for weights of two shapes and an activation that is not known.
    """

    gate: PackedWeight
    up: PackedWeight
    activation: str | None = "silu"
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None

    def __post_init__(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {ACTIVATIONS}; got {self.activation!r}")
        if self.gate.shape != self.up.shape:
            raise ValueError(
                f"gate and up must have one shape; got {self.gate.shape} and {self.up.shape}"
            )

    @classmethod
    def halves(cls, both: PackedWeight, activation: str | None, bias: Tensor | None = None) -> Gate:
        """Split one weight [2 * channels, in] and its bias into views: gate's channels first."""
        channels = both.shape[0] // 2
        biases = (None, None) if bias is None else bias.chunk(2)
        parts = (both.rows(slice(0, channels)), both.rows(slice(channels, None)))
        return cls(*parts, activation, *biases)

    @property
    def channels(self) -> int:
        """Number of outputs per token."""
        return self.gate.shape[0]

    @property
    def products(self) -> tuple[tuple[PackedWeight, Tensor | None], ...]:
        """(weight, bias) of gate, then of up."""
        return (self.gate, self.gate_bias), (self.up, self.up_bias)
