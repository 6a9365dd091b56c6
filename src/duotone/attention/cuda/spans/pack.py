"""Quantize visual spans straight into records: two launches, for bounds and for codes, or one where
few rows fit shared memory (spans/held.py).

The plain-torch reference is `PackedPair.pack`, then `layout.span_layout`; on a GPU all bytes and
parameters equal theirs (but for the sign of a zero).
"""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float
from torch import Tensor

from duotone.attention.cuda.packing.inputs import (
    INPUTS,
    TILE_TOKENS,
    Dense,
    alignment,
    check_readable,
    dense,
    tile_bytes,
)
from duotone.attention.cuda.shared.counters import counters
from duotone.attention.cuda.shared.filling import filled_tiles, fitted, has_records
from duotone.attention.cuda.shared.geometry import max_cluster, multiprocessors, shared_bytes
from duotone.attention.cuda.shared.runtime import Kernel, Launch, kernel
from duotone.attention.cuda.shared.tables import once_per_table
from duotone.attention.cuda.spans.held import SOURCE as ONCE_SOURCE
from duotone.attention.cuda.spans.held import Held, held, sharers
from duotone.attention.cuda.spans.layout import (
    LANES,
    TILE,
    WIDTHS,
    RecordFormat,
    Records,
    format_of,
    span_layout,
)
from duotone.attention.refused import RefusedError, check_honoured, reason_against
from duotone.cache import BlockTable, PackedTensor
from duotone.cache.ledger import Piece
from duotone.cache.pair import PackedPair
from duotone.quant import KVSpec
from duotone.quant.checks import NOT_FINITE, is_finite
from duotone.quant.honours import Honours

HONOURS = Honours.of("packing kernels of spans", {"bits", "group", "shrink"}, WIDTHS, True)
SOURCE = "spans/pack.cu"
WARPS, THREADS = 4, 256
# Tokens of which one block of threads takes the bounds, and such blocks per SM, to begin with.
SPLIT_TOKENS, MIN_SPLIT_TOKENS, BLOCKS_PER_SM = 1024, 128, 4


class Arguments(ctypes.Structure):
    """`Arguments` of spans/pack.cu."""

    _fields_ = (
        *((name, Dense) for name in ("key", "value")),
        *((name, ctypes.c_void_p) for name in (
            "index", "offsets", "first_packed_tiles", "k_scale", "k_zero", "v_scale", "v_zero",
            "packed_tiles", "partial", "counters",
        )),
        *((name, ctypes.c_int) for name in (
            "kv_heads", "taken", "blocks", "packed_tiles_per_head", "splits",
        )),
        *((name, ctypes.c_float) for name in ("k_shrink", "v_shrink")),
    )  # fmt: skip


class SpanLayout:
    """Layout of visual spans in a cache on CUDA (`cache.pair.Layout`)."""

    def __call__(self, key: PackedTensor, value: PackedTensor) -> Records | None:
        """The records of K and V that are packed already."""
        return span_layout(key, value)

    def pack(self, key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> PackedPair | None:
        """Quantize dense K and V into records; None where torch has to, or to raise."""
        blocks = piece.spans.split(spec.key.group)
        if not key.is_cuda or reason_against(check, spec, key, value):
            return None
        if not has_records(_format(spec, key), blocks):
            return None
        pair = span_pack(key, value, spec, piece)
        return pair if is_finite(_total(pair), NOT_FINITE) else None


def check(spec: KVSpec, *states: Tensor) -> None:
    """Raise `RefusedError` for specs of spans, or for K and V, that no kernel packs."""
    check_honoured(HONOURS, spec.key, spec.value)
    if spec.key.group != spec.value.group:
        raise RefusedError(
            f"K and V must share their groups; got {spec.key.group} and {spec.value.group}"
        )
    format_of(spec.key, spec.value, (0, 0))
    check_readable(*states)


def _format(spec: KVSpec, key: Tensor) -> RecordFormat:
    return RecordFormat(key.shape[3], spec.key.bits, spec.value.bits)


def span_pack(key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> PackedPair:
    """Quantize the tokens that `piece` takes out of K and V, [batch, kv_heads, n, head_dim].

    Numbers that are not finite become scales that are not. The host waits for the number of records
    once per table of spans; the launches wait for nothing.
    Errors: ValueError for what `check` refuses.
    """
    if reason := reason_against(check, spec, key, value):
        raise ValueError(f"{reason}. Use PackedPair.pack.")
    blocks = piece.spans.split(spec.key.group)
    form = fitted(_format(spec, key), blocks)
    first, per_head = places(blocks, form.tokens)
    batch, heads, _, channels = key.shape
    shape = (4, batch, heads, blocks.blocks, channels)
    params = torch.empty(shape, dtype=torch.float16, device=key.device)
    data = torch.empty((batch, heads, per_head, form.nbytes), dtype=torch.uint8, device=key.device)
    records = Records(form, data, first)
    _launch(key, value, spec, piece, blocks, records, params)
    tensors = [
        PackedTensor(tensor, channels, key.dtype, blocks, None, scale, zero)
        for tensor, scale, zero in zip(
            (spec.key, spec.value), params[::2], params[1::2], strict=True
        )
    ]
    return PackedPair(*tensors, records)


def _launch(
    key: Tensor,
    value: Tensor,
    spec: KVSpec,
    piece: Piece,
    blocks: BlockTable,
    records: Records,
    params: Tensor,
) -> None:
    batch, heads, per_head, _ = records.data.shape
    rows = 2 * batch * heads * blocks.blocks
    if not rows:
        return
    index, offsets = piece.take.index.contiguous(), blocks.offsets.contiguous()
    given = Arguments(
        key=dense(key),
        value=dense(value),
        **{name: x.data_ptr() for name, x in (
            ("index", index), ("offsets", offsets), ("first_packed_tiles", records.first),
            ("k_scale", params[0]), ("k_zero", params[1]),
            ("v_scale", params[2]), ("v_zero", params[3]), ("packed_tiles", records.data),
        )},
        kv_heads=heads,
        taken=index.shape[1],
        blocks=blocks.blocks,
        packed_tiles_per_head=per_head,
        k_shrink=spec.key.shrink,
        v_shrink=spec.value.shrink,
    )  # fmt: skip
    macros = common_macros(records.format, key.dtype, min(alignment(key), alignment(value)))
    with torch.cuda.device(key.device):
        at = _held(key, records.format, blocks, rows, macros)
        if at is not None:
            function, launch = _once(at, records.format, key.dtype, rows, macros, key.device)
            function(launch, given)
        else:
            _launch_twice(given, records, key, rows, blocks.longest, macros)


def _held(
    key: Tensor, form: RecordFormat, blocks: BlockTable, rows: int, macros: dict[str, int]
) -> Held | None:
    device, dtype = key.device, key.dtype

    def at_once(at: Held) -> int:
        function, launch = _once(at, form, dtype, rows, macros, device)
        return function.clusters_at_once(launch)

    sms, most = multiprocessors(device), max_cluster(device)
    shared = shared_bytes(device)
    return held(blocks.longest, rows, form, dtype, sms, shared, most, at_once)


def _once(
    at: Held,
    form: RecordFormat,
    dtype: torch.dtype,
    rows: int,
    macros: dict[str, int],
    device: torch.device,
) -> tuple[Kernel, Launch]:
    macros = macros | once_macros(at, form)
    threads, nbytes = macros["WARPS"] * LANES, at.shared_bytes(form, dtype)
    function = kernel(ONCE_SOURCE, "span_pack_once", tuple(macros.items()), device)
    return function, Launch(rows * at.cluster, threads, nbytes, cluster=at.cluster)


def _launch_twice(
    given: Arguments,
    records: Records,
    key: Tensor,
    rows: int,
    longest: int,
    macros: dict[str, int],
) -> None:
    given.splits = splits_of(longest, rows, multiprocessors(key.device))
    partial = key.new_empty(rows * given.splits * 2 * key.shape[3], dtype=torch.float32)
    given.partial = partial.data_ptr()
    given.counters, _zeros = counters(key.device, rows)
    macros = macros | twice_macros(records.format, key.dtype)
    batch, heads, per_head, _ = records.data.shape
    packing = 2 * batch * heads * -(-per_head * records.format.tiles // WARPS)
    launches = {
        "span_bounds": Launch(rows * given.splits, THREADS, 0),
        "span_pack": Launch(packing, WARPS * LANES, WARPS * macros["WARP_SHARED_BYTES"]),
    }
    for name, at in launches.items():
        if at.blocks:
            kernel(SOURCE, name, tuple(macros.items()), key.device)(at, given)


def macros_of(form: RecordFormat, dtype: torch.dtype, align: int) -> dict[str, int]:
    """Macros of spans/pack.cu."""
    return common_macros(form, dtype, align) | twice_macros(form, dtype)


def common_macros(form: RecordFormat, dtype: torch.dtype, align: int) -> dict[str, int]:
    """Macros of both sources."""
    return {
        "CHANNELS": form.head_dim,
        "KB": form.key_bits,
        "VB": form.value_bits,
        "TILES": form.tiles,
        "INPUT": INPUTS[dtype],
        "ALIGN": align,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }


def twice_macros(form: RecordFormat, dtype: torch.dtype) -> dict[str, int]:
    """Macros of spans/pack.cu in addition to those of both sources."""
    words_bytes = TILE_TOKENS * form.channels * max(form.key_bits, form.value_bits) // 8
    levels_bytes = 16 * form.channels
    return {
        "WARPS": WARPS,
        "THREADS": THREADS,
        "WARP_SHARED_BYTES": tile_bytes(form.channels, dtype) + words_bytes + levels_bytes,
    }


def once_macros(at: Held, form: RecordFormat) -> dict[str, int]:
    """Macros of spans/pack_once.cu in addition to those of both sources."""
    return {
        "WARPS": at.slots * sharers(form),
        "SHARERS": sharers(form),
        "CLUSTER": at.cluster,
        "BEFORE_TILES_BYTES": at.before_tiles_bytes(form),
    }


def splits_of(longest: int, rows: int, sms: int) -> int:
    """Parts of a block of tokens whose bounds are taken apart: few, unless the device is idle."""
    wanted = max(-(-longest // SPLIT_TOKENS), -(-BLOCKS_PER_SM * sms // rows))
    return max(1, min(wanted, longest // MIN_SPLIT_TOKENS))


def _total(pair: PackedPair) -> Float[Tensor, ""]:
    params = (pair.key.scale, pair.key.zero_point, pair.value.scale, pair.value.zero_point)
    return torch.stack(params).sum(dtype=torch.float32)


@once_per_table
def places(blocks: BlockTable, tokens: int) -> tuple[Tensor, int]:
    """(first record of each block [batch, blocks] int32, records of the longest sequence).

    tokens: per record.
    """
    counts = -(-blocks.sizes // tokens)
    first = (counts.cumsum(-1) - counts).int()
    return first, filled_tiles(blocks, TILE)[tokens // TILE] * TILE // tokens
