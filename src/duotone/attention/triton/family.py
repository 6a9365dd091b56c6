"""The family of Triton kernels: packed tokens in canonical order, and dense ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from duotone.attention.family import Family, Tokens
from duotone.attention.refused import RefusedError
from duotone.cache.packed import PackedTensor
from duotone.cache.segments import Segment
from duotone.quant import TensorSpec
from duotone.quant.honours import Honours

HONOURS = Honours.of(
    "Triton kernels",
    {"bits", "along", "group", "mapping", "classes", "transform", "param_dtype"},
    (8, 4, 2, 1),
)
QUERY_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 512
# Class numbers become channel orders in bytes, and counts of nine binary digits.
MAX_CLASSES_HEAD_DIM = 256


def _rule(tokens: Tokens) -> None:
    if tokens.query not in QUERY_DTYPES:
        raise RefusedError(f"query must be one of {QUERY_DTYPES}; got {tokens.query}")
    for head_dim, kept in zip(tokens.head_dims, (tokens.key, tokens.value), strict=True):
        if head_dim > MAX_HEAD_DIM:
            raise RefusedError(f"head_dim must be at most {MAX_HEAD_DIM}; got {head_dim}")
        if isinstance(kept, TensorSpec):
            if reason := HONOURS.refusal(kept):
                raise RefusedError(reason)
            if kept.classes and head_dim > MAX_CLASSES_HEAD_DIM:
                raise RefusedError(
                    f"head_dim of unequal channels must be at most {MAX_CLASSES_HEAD_DIM}; "
                    f"got {head_dim}"
                )
        elif kept not in QUERY_DTYPES:
            raise RefusedError(f"dense K and V must be one of {QUERY_DTYPES}; got {kept}")


def _at_call(query: Tensor, segment: Segment, tokens: Tokens) -> None:
    for x in (segment.key, segment.value):
        if isinstance(x, PackedTensor):
            strided = [n for n in x.tensor_names() if not getattr(x, n).is_contiguous()]
            if strided:
                raise RefusedError(f"packed K and V must be contiguous; {strided} are not")
            continue
        rows = (x.stride(0), x.stride(1), x.stride(2))
        whole = x.stride(2) == x.shape[3] and not any(row % x.shape[3] for row in rows)
        if x.numel() and (x.stride(3) != 1 or not whole):
            raise RefusedError(f"tokens of dense K and V must be adjacent; got {rows}")


TRITON = Family(
    "triton",
    "Triton kernels",
    kinds=("visual", "background", "text", "dense"),
    honours=HONOURS,
    takes=lambda tokens: True,
    holds=lambda segment: True,
    rule=_rule,
    at_call=_at_call,
)


def no_triton(device: torch.device) -> str | None:
    """Why Triton runs nothing on a device, or None."""
    if find_spec("triton") is None:
        return "it needs Triton, which is not installed (duotone[triton])"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"Triton needs a CUDA device or TRITON_INTERPRET=1; got a model on {device}"
    return None


def first_refusal(query: Tensor, kv: Sequence[Segment]) -> str | None:
    """Why Triton cannot run this call, or None."""
    if reason := no_triton(query.device):
        return reason
    refusals = (TRITON.refusal(Tokens.of(query, segment), query, segment) for segment in kv)
    return next(filter(None, refusals), None)
