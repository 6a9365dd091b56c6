"""Quantize visual spans by levels that are searched: Lloyd's, gains and weights of tokens.

The search reads K and V first (`levels.search`, or torch where it refuses). The second launch of
`spans.pack` then writes their codes into records.

The plain-torch reference is `PackedPair.pack`, then `layout.span_layout`; on a GPU all bytes equal
those that torch writes by the same levels.
"""

from __future__ import annotations

from torch import Tensor

from duotone.attention.cuda.classes.levels import SortedLevels
from duotone.attention.cuda.classes.pack import sorted_levels
from duotone.attention.cuda.classes.small_levels import stored_levels
from duotone.attention.cuda.levels import search
from duotone.attention.cuda.spans.pack import arguments, empty_records, pack_codes
from duotone.attention.cuda.spans.pack import check as check_plain
from duotone.attention.refused import reason_against
from duotone.cache import PackedTensor
from duotone.cache.ledger import Piece
from duotone.cache.pair import PackedPair
from duotone.quant import KVSpec
from duotone.quant.honours import Honours

HONOURS = Honours.of(
    "packing kernels of spans with searched levels",
    search.HONOURS.honours - {"classes", "transform"},
    search.HONOURS.bits,
    packs=True,
    params=search.HONOURS.params,
)


def check(spec: KVSpec, *states: Tensor) -> None:
    """Raise `RefusedError` for specs of spans, or for K and V, that no kernel packs."""
    check_plain(spec, *states, honours=HONOURS)


def searched_pack(key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> PackedPair:
    """Quantize the tokens that `piece` takes out of K and V, [batch, kv_heads, n, head_dim].

    The host waits as `classes.pack.class_pack` does.
    Errors: ValueError for what `check` refuses, for numbers that are not finite and for levels
    beyond fp16.
    """
    if reason := reason_against(check, spec, key, value):
        raise ValueError(f"{reason}. Use PackedPair.pack.")
    both = ((key, spec.key), (value, spec.value))
    levels = [sorted_levels(piece.take.pick(x), s, piece.spans, x.shape[3]) for x, s in both]
    stored = [stored_levels(x, s) for x, (_, s) in zip(levels, both, strict=True)]
    blocks = levels[0].blocks
    records = empty_records(key, spec, blocks)
    given = arguments(key, value, spec, piece, blocks, records, _chosen(levels))
    pack_codes(given, records, key, value)
    tensors = [
        PackedTensor(s, x.shape[3], key.dtype, blocks, None, *parameters)
        for (x, s), parameters in zip(both, stored, strict=True)
    ]
    return PackedPair(*tensors, records)


def _chosen(levels: list[SortedLevels]) -> list[Tensor]:
    """Scales and zero-points of K and V that codes are the nearest of; channels in their order."""
    return [part for x in levels for part in (x.chosen_scale, x.chosen_zero)]
