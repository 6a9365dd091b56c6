"""Quantize visual spans straight into records: two launches, for bounds and for codes, or one where
few rows fit shared memory (spans/held.py).

The plain-torch reference is `PackedPair.pack`, then `layout.span_layout`; on a GPU all bytes and
parameters equal theirs (but for the sign of a zero).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

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
from duotone.attention.cuda.shared.filling import filled_tiles, fitted
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
)
from duotone.attention.refused import RefusedError, check_honoured, reason_against
from duotone.cache import BlockTable, PackedTensor
from duotone.cache.ledger import Piece
from duotone.cache.pair import PackedPair
from duotone.quant import KVSpec
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


def check(spec: KVSpec, *states: Tensor, honours: Honours = HONOURS) -> None:
    """Raise `RefusedError` for specs of spans, or for K and V, that no kernel packs."""
    check_honoured(honours, spec.key, spec.value)
    if spec.key.group != spec.value.group:
        raise RefusedError(
            f"K and V must share their groups; got {spec.key.group} and {spec.value.group}"
        )
    format_of(spec.key, spec.value, (0, 0))
    check_readable(*states)


def span_pack(key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> PackedPair:
    """Quantize the tokens that `piece` takes out of K and V, [batch, kv_heads, n, head_dim].

    Numbers that are not finite become scales that are not. The host waits for the number of records
    once per table of spans; the launches wait for nothing.
    Errors: ValueError for what `check` refuses.
    """
    if reason := reason_against(check, spec, key, value):
        raise ValueError(f"{reason}. Use PackedPair.pack.")
    blocks = piece.spans.split(spec.key.group)
    batch, heads, _, channels = key.shape
    shape = (4, batch, heads, blocks.blocks, channels)
    params = torch.empty(shape, dtype=torch.float16, device=key.device)
    records = empty_records(key, spec, blocks)
    given = arguments(key, value, spec, piece, blocks, records, params)
    _launch(given, records, key, value, blocks)
    tensors = [
        PackedTensor(tensor, channels, key.dtype, blocks, None, scale, zero)
        for tensor, scale, zero in zip(
            (spec.key, spec.value), params[::2], params[1::2], strict=True
        )
    ]
    return PackedPair(*tensors, records)


def empty_records(key: Tensor, spec: KVSpec, blocks: BlockTable) -> Records:
    """Room for the codes of blocks of tokens. The host waits once per table."""
    batch, heads, _, channels = key.shape
    form = fitted(format_of(spec.key, spec.value, (channels, channels)), blocks)
    first, per_head = places(blocks, form.tokens)
    data = torch.empty((batch, heads, per_head, form.nbytes), dtype=torch.uint8, device=key.device)
    return Records(form, data, first)


def arguments(
    key: Tensor,
    value: Tensor,
    spec: KVSpec,
    piece: Piece,
    blocks: BlockTable,
    records: Records,
    params: Sequence[Tensor],
) -> Arguments:
    """Arguments of all launches. params: K's scales and zero-points, then V's."""
    index, offsets = piece.take.index.contiguous(), blocks.offsets.contiguous()
    names = ("k_scale", "k_zero", "v_scale", "v_zero")
    given = Arguments(
        key=dense(key),
        value=dense(value),
        **{name: x.data_ptr() for name, x in (
            ("index", index), ("offsets", offsets), ("first_packed_tiles", records.first),
            *zip(names, params, strict=True), ("packed_tiles", records.data),
        )},
        kv_heads=key.shape[1],
        taken=index.shape[1],
        blocks=blocks.blocks,
        packed_tiles_per_head=records.data.shape[2],
        k_shrink=spec.key.shrink,
        v_shrink=spec.value.shrink,
    )  # fmt: skip
    given.kept = (index, offsets)  # alive until the launches
    return given


def pack_codes(given: Arguments, records: Records, key: Tensor, value: Tensor) -> None:
    """Write the codes by levels that `given` has. Nothing here waits for the device."""
    macros = _common_macros(records, key, value) | twice_macros(records.format, key.dtype)
    batch, heads, per_head, _ = records.data.shape
    blocks = 2 * batch * heads * -(-per_head * records.format.tiles // WARPS)
    if blocks:
        at = Launch(blocks, WARPS * LANES, WARPS * macros["WARP_SHARED_BYTES"])
        with torch.cuda.device(key.device):
            kernel(SOURCE, "span_pack", tuple(macros.items()), key.device)(at, given)


def _launch(
    given: Arguments, records: Records, key: Tensor, value: Tensor, blocks: BlockTable
) -> None:
    rows = 2 * key.shape[0] * key.shape[1] * blocks.blocks
    if not rows:
        return
    macros = _common_macros(records, key, value)
    with torch.cuda.device(key.device):
        at = _held(key, records.format, blocks, rows, macros)
        if at is not None:
            function, launch = _once(at, records.format, key.dtype, rows, macros, key.device)
            function(launch, given)
            return
        _find_bounds(given, records.format, key, rows, blocks.longest, macros)
    pack_codes(given, records, key, value)


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


def _find_bounds(
    given: Arguments,
    form: RecordFormat,
    key: Tensor,
    rows: int,
    longest: int,
    macros: dict[str, int],
) -> None:
    given.splits = splits_of(longest, rows, multiprocessors(key.device))
    partial = key.new_empty(rows * given.splits * 2 * key.shape[3], dtype=torch.float32)
    given.partial = partial.data_ptr()
    given.counters, _zeros = counters(key.device, rows)
    macros = macros | twice_macros(form, key.dtype)
    at = Launch(rows * given.splits, THREADS, 0)
    kernel(SOURCE, "span_bounds", tuple(macros.items()), key.device)(at, given)


def macros_of(form: RecordFormat, dtype: torch.dtype, align: int) -> dict[str, int]:
    """Macros of spans/pack.cu."""
    return common_macros(form, dtype, align) | twice_macros(form, dtype)


def _common_macros(records: Records, key: Tensor, value: Tensor) -> dict[str, int]:
    return common_macros(records.format, key.dtype, min(alignment(key), alignment(value)))


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


def total(pair: PackedPair) -> Float[Tensor, ""]:
    """Sum of all scales and zero-points; finite if all of them are."""
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
