"""The family of PyTorch operations, which read what no kernel reads."""

from __future__ import annotations

from duotone.attention.family import Family, Tokens
from duotone.attention.refused import RefusedError
from duotone.quant import TensorSpec
from duotone.quant.honours import TORCH_PACKING, TORCH_READING


def _rule(tokens: Tokens) -> None:
    for kept in (tokens.key, tokens.value):
        if isinstance(kept, TensorSpec) and (reason := TORCH_READING.refusal(kept)):
            raise RefusedError(reason)


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
