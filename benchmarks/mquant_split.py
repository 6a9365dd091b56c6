"""Tables of the paper that need no pretrained weights: what RMS and random signs are worth.

Weights and activations are synthetic: rows of W have a mean of a third of their spread (eq. 8
holds), inputs are those of a GELU MLP (all means positive) or of a SwiGLU one (means near 0), with
one channel in a thousand 20 times the others: what the transform is there for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.weights.equivalences.hadamard import (
    HadamardPlan,
    plan_hadamard,
    random_signs,
    transform,
)
from duotone.weights.equivalences.outlier_split import channel0_share, incoherence, split_channel0

Activation = Literal["gelu", "swiglu"]
# MLP widths of real models, and the activation in front.
SIZES: dict[str, tuple[int, Activation]] = {
    "Qwen2-VL-7B language": (18944, "swiglu"),
    "Qwen2-VL vision": (5120, "gelu"),
    "Qwen2.5-VL vision": (3420, "swiglu"),
    "InternVL2-8B language": (14336, "swiglu"),
    "InternViT-300M": (4096, "gelu"),
    "SigLIP-SO400M": (4304, "gelu"),
    "GLM-4V language": (13696, "swiglu"),
    "EVA2-CLIP-E": (15360, "gelu"),
    "Llama-2-7B": (11008, "swiglu"),
}
# QuaRot's and MQuant's tables: what they pad a size to, and the sum of row 0 of their base.
PUBLISHED_PLANS = {
    3420: (3456, 108),
    4096: (4096, 1),
    4304: (4480, 140),
    5120: (5120, 20),
    11008: (11008, 172),
    13696: (13824, 108),
    14336: (14336, 28),
    15360: (15360, 60),
    18944: (19968, 156),
}
PUBLISHED_ROW0 = {1: 1, 12: 10, 20: 18, 28: 26, 36: 34, 40: 36, 52: 4, 60: 58} | {
    108: 106,
    140: 138,
    156: 24,
    172: 16,
}
OUTPUTS, TOKENS = 64, 128
ROW_MEAN = 1 / 3
OUTLIER_EVERY, OUTLIER_FACTOR = 1000, 20.0


def split_rows(
    sizes: dict[str, tuple[int, Activation]] | None = None, seed: int = 0
) -> list[dict[str, Any]]:
    """One row per model and way to transform: incoherence, channel-0 share, SQNR of W4A8."""
    found = []
    for model, (size, activation) in (sizes or SIZES).items():
        weight, x = _weight(size, seed), _activations(size, activation, seed + 1)
        for way, plan, w, a, share in _ways(weight, x, seed):
            head = {"model": model, "size": size, "activation": activation, "transform": way}
            head |= {"padded": plan.padded, "base": plan.base} if plan else {}
            for split in (False, True) if plan else (False,):
                found.append(head | {"split": split} | _measured(w, a, split, share))
    return found


def _ways(
    weight: Tensor, x: Tensor, seed: int
) -> Iterator[tuple[str, HadamardPlan | None, Tensor, Tensor, float | None]]:
    size = weight.shape[1]
    yield "none", None, weight, x, None
    if size in PUBLISHED_PLANS:
        plan, flips = published(size)
        made = (transform_with(t, plan, flips) for t in (weight, x))
        yield "as published", plan, *made, channel0_share(plan, PUBLISHED_ROW0[plan.base])
    plan = plan_hadamard(size)
    yield "sign-normalised", plan, transform(weight, plan), transform(x, plan), channel0_share(plan)
    signs = random_signs(size, seed)
    turned = (transform(t, plan, signs) for t in (weight, x))
    yield "random signs", plan, *turned, channel0_share(plan) * float(signs.mean()) ** 2


def published(size: int) -> tuple[HadamardPlan, Tensor]:
    """The plan of the published code for `size`, and signs [m] of its base's row 0.

    Our base with these column signs has the same row 0, and so the same channel 0.
    """
    padded, m = PUBLISHED_PLANS[size]
    plan = HadamardPlan(size, padded, 1, m, padded // m)
    minus = (m - PUBLISHED_ROW0[m]) // 2
    signs = torch.ones(m, dtype=torch.float64)
    signs[torch.arange(minus) * m // max(minus, 1)] = -1
    return plan, signs


def transform_with(x: Tensor, plan: HadamardPlan, base_signs: Tensor) -> Tensor:
    """`transform` by (H_m diag(base_signs)) (x) H_p."""
    wide = F.pad(x, (0, plan.padded - plan.size))
    flipped = wide * base_signs.to(x).repeat_interleave(plan.power)
    whole = HadamardPlan(plan.padded, plan.padded, 1, plan.base, plan.power)
    return transform(flipped, whole)


def _weight(size: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.randn(OUTPUTS, size, generator=generator)
    mean = torch.randn(OUTPUTS, 1, generator=generator) * ROW_MEAN
    return (spread + mean) / size**0.5


def _activations(size: int, activation: Activation, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    gate, up = (torch.randn(TOKENS, size, generator=generator) for _ in range(2))
    x = F.gelu(gate) if activation == "gelu" else F.silu(gate) * up
    x[:, ::OUTLIER_EVERY] *= OUTLIER_FACTOR
    return x


def _measured(w: Tensor, x: Tensor, split: bool, share: float | None) -> dict[str, Any]:
    kept = split_channel0(w).main if split else w
    quantized = _w4a8(kept, split_channel0(x).main if split else x)
    if split:
        quantized = quantized + x[:, :1] * w[:, 0]
    return {
        "incoherence": incoherence(kept[:, 1:] if split else w),
        "channel0_share": share,
        "sqnr_db": sqnr_db(x @ w.T, quantized),
    }


def _w4a8(w: Tensor, x: Tensor) -> Tensor:
    """Round-to-nearest: weights per output channel to 4 bit, activations per tensor to 8."""
    w_scale = w.abs().amax(1, keepdim=True) / 7
    x_scale = x.abs().amax() / 127
    codes = (x / x_scale).round() @ (w / w_scale).round().T
    return codes * x_scale * w_scale.T


def sqnr_db(exact: Tensor, quantized: Tensor) -> float:
    """10 log10 of signal over noise energy; inf where nothing was lost."""
    noise = (exact - quantized).double().square().sum()
    return float(10 * torch.log10(exact.double().square().sum() / noise))
