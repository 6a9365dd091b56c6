"""Gate and up of an MLP by warpgroup products in one launch, the activation where sums are scaled.

A warpgroup has 64 channels of gate and the same channels of up. So a thread has both sums of each
number that it writes. A product would write twice as much, and the next kernel read it.
"""

from __future__ import annotations

from torch import Tensor

from duotone.weights.kernels.cuda import wgmma_gemm
from duotone.weights.kernels.cuda.wgmma_tiles import WgmmaTile, best_tile
from duotone.weights.kernels.devices import multiprocessors
from duotone.weights.modules.gate import Gate

# GATED in the source. All are x times a sigmoid; erf has some twenty instructions more.
ACTIVATIONS = {"silu": 1, "quick_gelu": 2, "gelu_tanh": 3}


def unsupported(gate: Gate) -> str | None:
    """Reason why these weights cannot be multiplied so, or None."""
    if gate.activation not in ACTIVATIONS:
        return f"activation must be one of {tuple(ACTIVATIONS)}; got {gate.activation!r}"
    for weight, _ in gate.products:
        if weight.bits != 8:
            return f"it takes weights of 8 bits; got {weight.bits}"
        if weight.w0 is not None:
            return "it takes no split column; got a weight with w0"
    if wgmma_gemm.type_of(gate.gate_bias) != wgmma_gemm.type_of(gate.up_bias):
        return "gate and up must have biases of one type, or none"
    return wgmma_gemm.unsupported(gate.gate) or wgmma_gemm.unsupported(gate.up)


def gated_wgmma(
    x_q: Tensor, row_scale: Tensor, gate: Gate, out: Tensor, tile: WgmmaTile | None = None
) -> Tensor:
    """Launch: int8 x_q [tokens, in], contiguous; fills `out` [tokens, channels] and returns it.

    tile: with two rows; the best by prediction if None.
    Errors: ValueError where x_q, codes or `out` do not begin at a multiple of 16 bytes.
    """
    weight, up = gate.gate, gate.up
    wgmma_gemm.check_starts(x_q=x_q, gate=weight.codes, up=up.codes, out=out)
    (tokens, ins), outs = x_q.shape, 2 * gate.channels
    tile = tile or best_tile(tokens, outs, ins, multiprocessors(x_q.device), gated=True)
    tensors = {
        "y": out,
        "row_scale": row_scale,
        "out_scale": weight.scale,
        "up_scale": up.scale,
        "bias": gate.gate_bias,
        "up_bias": gate.up_bias,
    }
    given = wgmma_gemm.arguments_of(tile, x_q, weight.codes, tensors, 1.0, up.codes)
    kinds = {
        "out": wgmma_gemm.type_of(out),
        "per_row": row_scale.numel() > 1,
        "bias": wgmma_gemm.type_of(gate.gate_bias),
        "gated": ACTIVATIONS[gate.activation],
    }
    wgmma_gemm.launch(tile, given, x_q, **kinds)
    return out
