"""The family of 16-bit tokens: sinks, windows and text beside packed tokens."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from duotone.attention.cuda.dense.decode import (
    ITEM_BYTES,
    KV_TYPES,
    WARPS,
    DenseFormat,
    dense_task,
    moves,
    sizes,
)
from duotone.attention.cuda.shared.work import MAX_GROUP, QUERY_TYPES
from duotone.attention.family import Family, Tokens
from duotone.attention.refused import RefusedError, reason_against
from duotone.cache.segments import DenseSegment
from duotone.quant.honours import Honours

ALIGNMENT_BYTES = 16


def _rule(tokens: Tokens) -> None:
    key, value = tokens.key, tokens.value
    if tokens.calibrated:
        raise RefusedError("score calibration of 16-bit tokens is not in the CUDA kernels")
    if tokens.query not in QUERY_TYPES:
        raise RefusedError(f"query must be one of {list(QUERY_TYPES)}; got {tokens.query}")
    if tokens.masked:
        raise RefusedError("the CUDA kernels take no mask")
    if key not in KV_TYPES or value != key:
        raise RefusedError(f"dense K and V must be of one 16-bit type; got {key} and {value}")
    head_dim, value_dim = tokens.head_dims
    if value_dim != head_dim or head_dim % 16 or head_dim > 256 or tokens.group > MAX_GROUP:
        raise RefusedError(
            "no CUDA kernel for head_dim "
            f"{head_dim} and {value_dim} with {tokens.group} q heads per kv head"
        )
    form = DenseFormat(head_dim)
    block_bytes = WARPS * form.stages * form.nbytes
    if block_bytes > tokens.shared_bytes:
        raise RefusedError(
            f"head_dim {head_dim} needs {block_bytes} bytes of shared memory per block"
        )


def _at_call(query: Tensor, segment: DenseSegment, tokens: Tokens) -> None:
    _check_rows(segment)


def _check_rows(segment: DenseSegment) -> None:
    """Raise `RefusedError` for tensors that the kernel cannot read: a call may bring any."""
    head_dim, low_bits = segment.key.shape[3], 0
    for x in (segment.key, segment.value):
        batch, head, token, channel = x.stride()
        if channel != 1 or token != head_dim:
            raise RefusedError("tokens of dense K and V must be adjacent")
        low_bits |= x.data_ptr() | ITEM_BYTES * batch | ITEM_BYTES * head
    if low_bits % ALIGNMENT_BYTES:
        raise RefusedError(f"dense K and V must be aligned to {ALIGNMENT_BYTES} bytes")


def _alike(segment: DenseSegment) -> Hashable:
    return None if reason_against(_check_rows, segment) else (segment.visual, sizes(segment))


DENSE = Family(
    "cuda",
    "16-bit tokens",
    kinds=("dense",),
    honours=Honours.of("16-bit tokens", ()),
    takes=lambda tokens: True,
    holds=lambda segment: isinstance(segment, DenseSegment),
    rule=_rule,
    at_call=_at_call,
    task=dense_task,
    moves=moves,
    alike=_alike,
)
