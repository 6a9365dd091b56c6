"""The family of short spans: pictures in canonical order, whose tokens fill no records."""

from __future__ import annotations

from torch import Tensor

from duotone.attention.cuda.shared import runtime
from duotone.attention.cuda.shared.of_records import CALIBRATED, NO_MASK
from duotone.attention.cuda.shared.tables import once_per_table
from duotone.attention.cuda.shared.work import MAX_GROUP, QUERY_TYPES
from duotone.attention.cuda.short.decode import form_of, per_sm, short_task
from duotone.attention.cuda.short.unpack import short_unpack
from duotone.attention.family import Family, Tokens
from duotone.attention.refused import RefusedError
from duotone.cache.blocks import BlockTable
from duotone.cache.segments import PackedSegment, Segment
from duotone.quant.honours import Honours

# A warp reads a span by itself.
MOST_TOKENS = 256
MAX_CHANNELS = 256
HONOURS = Honours.of(
    "kernels of short spans",
    {"bits", "classes", "transform", "param_dtype"},
    (4, 2, 1),
    params=("float16", "float8"),
)


def _holds(segment: Segment) -> bool:
    """Whole spans of a few tokens each, K's and V's alike."""
    if not isinstance(segment, PackedSegment) or segment.records is not None:
        return False
    key, value = segment.key, segment.value
    known = not any(HONOURS.refusal(spec) for spec in segment.kept_as)
    return known and _same(key.blocks, value.blocks) and value.blocks.longest <= MOST_TOKENS


def _rule(tokens: Tokens) -> None:
    if tokens.query not in QUERY_TYPES:
        raise RefusedError(f"query must be one of {list(QUERY_TYPES)}; got {tokens.query}")
    if tokens.masked:
        raise RefusedError(NO_MASK)
    if tokens.calibrated:
        raise RefusedError(CALIBRATED)
    for spec in (tokens.key, tokens.value):
        if reason := HONOURS.refusal(spec):
            raise RefusedError(reason)
    head_dim, value_dim = tokens.head_dims
    form = form_of(tokens.key, tokens.value, head_dim, MOST_TOKENS)
    fits = value_dim == head_dim and head_dim % 4 == 0 and head_dim <= MAX_CHANNELS
    fits = fits and tokens.group <= MAX_GROUP
    if not fits or not per_sm(form, tokens.group, tokens.shared_bytes):
        raise RefusedError(
            f"no CUDA kernel of short spans has head_dim {head_dim} and {value_dim} with "
            f"{tokens.group} q heads per kv head"
        )


def _at_call(query: Tensor, segment: PackedSegment, tokens: Tokens) -> None:
    if reason := runtime.refusal(query.device, "auto"):
        raise RefusedError(reason)
    for x in (segment.key, segment.value):
        strided = [n for n in x.tensor_names() if not getattr(x, n).is_contiguous()]
        if strided:
            raise RefusedError(f"packed K and V must be contiguous; {strided} are not")
    if not segment.value.blocks.offsets.is_contiguous():
        raise RefusedError("offsets of spans must be contiguous")
    if segment.key.tokens != segment.value.tokens:
        raise RefusedError(
            "K and V must have room for equally many tokens; "
            f"got {segment.key.tokens} and {segment.value.tokens}"
        )


@once_per_table
def _same(one: BlockTable, other: BlockTable) -> bool:
    return one.same_as(other)


SHORT = Family(
    "cuda",
    "short spans",
    kinds=(),
    honours=HONOURS,
    takes=lambda tokens: False,
    holds=_holds,
    rule=_rule,
    at_call=_at_call,
    task=short_task,
    unpack=short_unpack,
)
