"""The family of PyTorch operations, which read what no kernel reads."""

from __future__ import annotations

from duotone.attention.family import Family, Tokens
from duotone.quant import TensorSpec
from duotone.quant.honours import TORCH_PACKING, TORCH_READING


def _rule(tokens: Tokens) -> str | None:
    packed = (kept for kept in (tokens.key, tokens.value) if isinstance(kept, TensorSpec))
    return next(filter(None, map(TORCH_READING.refusal, packed)), None)


TORCH = Family(
    "reference",
    "PyTorch operations",
    kinds=("visual", "background", "text", "dense"),
    honours=TORCH_READING,
    takes=lambda tokens: True,
    holds=lambda segment: True,
    rule=_rule,
    packs=TORCH_PACKING,
)
