"""The family of 16-bit tokens: sinks, windows and text next to packed tokens."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from duotone.attention.cuda.dense.decode import (
    KV_TYPES,
    WARPS,
    DenseFormat,
    dense_task,
    moves,
    sizes,
)
from duotone.attention.cuda.shared.work import MAX_GROUP, QUERY_TYPES, Fields
from duotone.attention.family import Family, Tokens
from duotone.attention.refused import RefusedError
from duotone.cache.segments import DenseSegment
from duotone.quant.honours import Honours

ALIGNMENT_BYTES = 16
# Arguments that say where rows of K and V are.
ROWS = ("key", "value", "key_batch", "key_head", "value_batch", "value_head")


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


def _check_rows(segment: DenseSegment) -> Fields:
    """Return `moves`; `RefusedError` for tensors that no kernel reads: a call may bring any."""
    adjacent = (segment.key.shape[3], 1)
    if segment.key.stride()[2:] != adjacent or segment.value.stride()[2:] != adjacent:
        raise RefusedError("tokens of dense K and V must be adjacent")
    fields, low_bits = moves(segment), 0
    for name in ROWS:
        low_bits |= fields[name]
    if low_bits % ALIGNMENT_BYTES:
        raise RefusedError(f"dense K and V must be aligned to {ALIGNMENT_BYTES} bytes")
    return fields


def _again(segment: DenseSegment) -> tuple[Hashable, Fields] | None:
    try:
        return sizes(segment), _check_rows(segment)
    except RefusedError:
        return None


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
    again=_again,
)
