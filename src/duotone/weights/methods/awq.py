"""AWQ (Lin et al. 2023): scale up input channels of large magnitude before rounding.

    s = mean|x|^alpha,   alpha the best of a grid:                                      (eq. 5)
    || Q(W diag(s)) diag(s)^-1 X - W X ||^2  over all linears that read x               (eq. 4)

diag(s)^-1 goes into the producer of x: a norm, V's rows, up_proj's rows. The error comes from
second moments H = X X^T as tr(D H D^T), so that every calibration token counts.

Where we differ from the authors' code: codes are symmetric; the error is measured at the linears
(theirs: at the attention or MLP around them). The clip search that follows (`rtn.weight_scale` with
moments) covers every linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from duotone.weights.equivalences.module_map import Block, at
from duotone.weights.methods.gptq import check_moments, output_error
from duotone.weights.methods.rtn import column_scales, padded, round_to_nearest

STEPS = 20
SMALLEST = 1e-4


@dataclass(frozen=True)
class Pair:
    """Linears `readers` and the producer of their input: outputs `rows` of a norm or a linear."""

    source: str
    readers: tuple[str, ...]
    rows: slice


@dataclass(frozen=True)
class Scaling:
    """factors [in] of eq. 5 and the alpha they have; || ... ||^2 with them, and with none."""

    factors: Tensor
    alpha: float
    error: float
    error_rtn: float


def pairs_of(model: nn.Module, block: Block) -> list[Pair]:
    """Pairs of a block whose inputs can be scaled without a change of its function.

    After a norm; o_proj where every query head has a V of its own; down_proj after a gate.
    """
    found = [Pair(b.norm, b.inputs, slice(None)) for b in block.branches if b.norm is not None]
    values = block.values
    count = values.heads * values.head_dim
    if at(model, block.attention_output).in_features == count:
        rows = slice(values.first_row, values.first_row + count)
        found.append(Pair(values.linear, (block.attention_output,), rows))
    if block.up is not None:
        # Of a fused gate_up_proj the last rows are up's.
        last = at(model, block.up).out_features
        rows = slice(last - at(model, block.mlp_output).in_features, last)
        found.append(Pair(block.up, (block.mlp_output,), rows))
    return found


def scaling_factors(average: Tensor, alpha: float) -> Tensor:
    """s [in] from mean |x| [in]; its largest and smallest are each other's inverse."""
    factors = average.float().pow(alpha).clamp(min=SMALLEST)
    return factors / (factors.amax() * factors.amin()).sqrt()


@torch.no_grad()
def search(
    weights: Sequence[Tensor],
    moments: Tensor,
    average: Tensor,
    bits: int,
    group: int | None = None,
) -> Scaling:
    """The best scaling of the one input that all `weights` [out, in] read.

    moments [in, in] and average [in]: X X^T and mean |x| of it. Not scaling (alpha 0) is among the
    candidates. Errors: ValueError for moments of another size, or not finite.
    """
    for weight in weights:
        check_moments(weight, moments)
    floats = [weight.float() for weight in weights]
    found = []
    for step in range(STEPS):
        factors = scaling_factors(average, step / STEPS)
        errors = [output_error(w, _restored(w, factors, bits, group), moments) for w in floats]
        found.append((sum(errors), step / STEPS, factors))
    error, alpha, factors = min(found, key=lambda one: one[0])
    return Scaling(factors, alpha, error, found[0][0])


def _restored(weight: Tensor, factors: Tensor, bits: int, group: int | None) -> Tensor:
    """Q(W diag(s)) diag(s)^-1."""
    wide = padded(weight * factors, group)
    codes, scale = round_to_nearest(wide, bits, group)
    return (codes * column_scales(scale, wide.shape[1]))[:, : weight.shape[1]] / factors
