"""Score calibration keeps a unit's scores in shared memory, so that K is read once.

    | rings of half records | 16-bit scores of the unit, 64 keys by 4 q heads a tile of 512 bytes |

Where they do not fit, spans/decode.cu reads K twice.
"""

from __future__ import annotations

from functools import cache

from duotone.attention.cuda.shared.geometry import Geometry, cuts
from duotone.attention.cuda.shared.slots import TILE
from duotone.attention.cuda.spans.layout import RecordFormat

SOURCE = "spans/calibrated.cu"
SCORE_BYTES = 2
# What CUDA takes of every block, and what the kernel's rings are aligned to.
RESERVED_BYTES, ALIGNMENT_BYTES = 1024, 1024


@cache
def kept_geometry(
    form: RecordFormat,
    group: int,
    warps: int,
    heads: int,
    blocks: int,
    records: int,
    sms: int,
    shared_bytes: int,
    max_unit_tokens: int,
    max_cluster: int,
) -> Geometry | None:
    """The cheapest cut whose scores fit and whose parts of a kv head run at once; or None.

    warps: of a multiprocessor. heads: batch * kv_heads. blocks: of tokens, per sequence. records:
    of a block, at most. shared_bytes: what one block alone may have. max_cluster: parts that the
    device keeps together; if there are more, all blocks must be resident.
    """
    options = cuts(form, warps, heads * blocks, records, sms, max_unit_tokens)
    fitting = {
        at: cost
        for at, cost in options.items()
        if _fits(form, group, at, records, shared_bytes)
        and (blocks * at.splits <= max_cluster or heads * blocks * at.splits <= at.per_sm * sms)
    }
    return min(fitting, key=lambda at: fitting[at]) if fitting else None


def block_bytes(form: RecordFormat, group: int, at: Geometry, records: int) -> int:
    """Dynamic shared memory of a block: rings of the halves of records, and scores."""
    rings = at.warps * form.stages * form.tiles * _half_tile_bytes(form)
    return rings + max(
        _score_bytes(form, group, -(-records // at.splits)), _query_bytes(form, group)
    )


def _fits(form: RecordFormat, group: int, at: Geometry, records: int, shared_bytes: int) -> bool:
    sums_bytes = 16 * _head_tiles(group) * (form.channels + 8)
    if form.stages * form.tiles * _half_tile_bytes(form) < sums_bytes:
        return False
    block = block_bytes(form, group, at, records) + static_bytes(form, group, at.warps)
    return at.per_sm * (block + RESERVED_BYTES) <= shared_bytes + RESERVED_BYTES


def static_bytes(form: RecordFormat, group: int, warps: int) -> int:
    """Bytes of a block next to rings and scores: maxima, ranges, barriers, alignment."""
    heads = 4 * _head_tiles(group)
    own = warps * (8 * heads + 8 * form.stages) + 20 * heads + 32
    return -(-own // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def _half_tile_bytes(form: RecordFormat) -> int:
    return TILE * form.channels * max(form.key_bits, form.value_bits) // 8


def _score_bytes(form: RecordFormat, group: int, records: int) -> int:
    return records * form.tokens * 4 * _head_tiles(group) * SCORE_BYTES


def _query_bytes(form: RecordFormat, group: int) -> int:
    """q as integers, V's scales and zero-points, ranges: where scores will be."""
    heads = 4 * _head_tiles(group)
    return form.channels * (2 * heads + 8) + 16 * heads + 16


def _head_tiles(group: int) -> int:
    """Tiles of 4 q heads."""
    return -(-group // 4)
