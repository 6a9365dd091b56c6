"""Quantize dense K and V straight into group records: one launch, one read of every element.

The plain-torch reference is `cache.packing.pack_groups`, then `groups.layout.to_group_records`; on
a GPU, codes, scales and zero-points equal theirs bit for bit. What may differ: a hybrid whose two
errors are the same but for the rounding of torch's sum and of what it adds, and the sign of a
zero-point of 0 where a group has zeros of both signs.
"""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from duotone.attention.cuda.groups.format import HONOURS as READ
from duotone.attention.cuda.groups.format import TILE, GroupFormat, Operand
from duotone.attention.cuda.groups.tiles import Tiles
from duotone.attention.cuda.packing.inputs import (
    INPUTS,
    Dense,
    alignment,
    check_readable,
    dense,
    tile_bytes,
)
from duotone.attention.cuda.shared.geometry import shared_bytes
from duotone.attention.cuda.shared.runtime import Launch, has_kernels, kernel
from duotone.attention.cuda.spans.layout import LANES
from duotone.attention.refused import RefusedError, check_honoured, reason_against
from duotone.quant import KVSpec, TensorSpec
from duotone.quant.checks import STREAM_NOT_FINITE, is_finite
from duotone.quant.honours import Honours

HONOURS = Honours.of(
    "packing kernels of groups",
    {"bits", "along", "group", "mapping", "hybrid_at", "shrink", "eta"},
    READ.bits,
    packs=True,
)
SOURCE = "groups/pack.cu"
WARPS = 4
# What warps that share groups pass each other.
STATIC_SHARED_BYTES = 8192
MAPPINGS = {"asymmetric": 0, "symmetric": 1, "hybrid": 2}
SYMMETRIC_HYBRID = 3
# Bits of `overflow`.
SCALE_TOO_LARGE, NO_ROOM = 1, 2
States = Float[Tensor, "batch kv_heads tokens head_dim"]


class Arguments(ctypes.Structure):
    """`Arguments` of groups/pack.cu."""

    _fields_ = (
        *((name, Dense) for name in ("key", "value")),
        *((name, ctypes.c_void_p) for name in (
            "norm", "index", "tiles", "where", "data",
        )),
        ("codes", ctypes.c_void_p * 2),
        ("overflow", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("kv_heads", "tiles_given", "room")),
        ("codes_room", ctypes.c_int * 2),
        *((name, ctypes.c_float * 2) for name in ("shrink", "eta", "rest")),
    )  # fmt: skip


def group_pack(
    key: States,
    value: States,
    index: Int[Tensor, "batch taken"],
    tiles: Int[Tensor, " batch"],
    where: Int[Tensor, " batch"],
    form: GroupFormat,
    specs: KVSpec,
    data: UInt8[Tensor, "batch kv_heads records bytes"],
    key_norm: Float[Tensor, "batch kv_heads head_dim"] | None = None,
    *,
    codes: tuple[Tiles | None, Tiles | None] = (None, None),
    overflow: Int[Tensor, 1] | None = None,
    decoding: bool = False,
) -> None:
    """Write the first `tiles[b]` tiles of 32 taken tokens from tile `where[b]` of `data` on.

    key, value: fp16, bf16 or fp32, with consecutive channels. index: int64, which token each taken
    token is; a multiple of 32 and of the groups along tokens. tiles: int64, whole groups; what is
    after them is neither read nor written. where: int64, counted from the start of a head's
    records. key_norm: keys are divided by it and rounded to their type before anything else.
    codes: where separate codes of K and V go, [batch, kv_heads, tiles, bytes], as many tiles
    as `data` or more; None: nowhere, another layer keeps them.
    overflow: int32; gets SCALE_TOO_LARGE where a scale or zero-point does not fit the decode
    kernel, NO_ROOM where tiles lie outside `data` (those are not written; without `overflow` the
    device stops). decoding: the tokens leave a window at a decode step, for `hybrid_at`.
    Nothing here waits for the device; the launch can be captured.
    Errors: ValueError for what `check` refuses, and shapes or types that do not fit.
    """
    _check(key, value, index, form, specs, data)
    _check_codes(codes, form, data)
    macros = macros_of(form, specs, key.dtype, decoding) | {
        "ALIGN": min(alignment(key), alignment(value)),
        "NORM": 0 if key_norm is None else 1 + INPUTS[key_norm.dtype],
    }
    given = _arguments(key, value, index, data, specs)
    norm, index = None if key_norm is None else key_norm.contiguous(), index.contiguous()
    given.norm = None if norm is None else norm.data_ptr()
    given.index, given.tiles, given.where = (x.data_ptr() for x in (index, tiles, where))
    given.overflow = None if overflow is None else overflow.data_ptr()
    given.room = data.shape[2] * form.tiles
    given.codes[:] = [None if x is None else x.data_ptr() for x in codes]
    given.codes_room[:] = [0 if x is None else x.shape[2] for x in codes]
    _launch(given, macros, 2 * data.shape[0] * data.shape[1], key.device)


def fits(overflow: Int[Tensor, 1], form: GroupFormat) -> bool:
    """True where all scales fit, and where a step checks that at its end.

    Along rows only numbers beyond fp16 do not fit, which PyTorch refuses too. Along k PyTorch takes
    larger scales than the kernel does, so the host waits for the answer.
    """
    if form.key.along_k or form.value.along_k:
        return not int(overflow)
    total = (overflow[0] == 0).float().reciprocal()  # infinite where a bit is set
    return is_finite(total, STREAM_NOT_FINITE)


def page_pack(
    key: States,
    value: States,
    index: Int[Tensor, "1 taken"],
    pages: Int[Tensor, " pages"],
    form: GroupFormat,
    specs: KVSpec,
    pool: UInt8[Tensor, "pool_pages kv_heads bytes"],
) -> None:
    """Quantize tokens of one sequence of K and V, or of many in a row, into pages of a pool.

    index: int64, which token each taken token is; as many as the pages hold. pages: int32, where
    they go; those of page 0 and below go nowhere. The rest is as of `group_pack`.
    """
    _check(key, value, index, form, specs, pool[:1, :, None])
    whole = index.shape[1] == len(pages) * form.tokens and pool.is_contiguous()
    if pages.dtype != torch.int32 or not whole:
        raise ValueError(
            f"index must take {form.tokens} tokens for each of the int32 pages, and the pool be "
            f"contiguous; got {tuple(index.shape)} and {tuple(pages.shape)} {pages.dtype}."
        )
    macros = macros_of(form, specs, key.dtype) | {
        "ALIGN": min(alignment(key), alignment(value)),
        "NORM": 0,
        "PAGED": form.tiles,
    }
    given = _arguments(key, value, index, pool, specs)
    index, pages = index.contiguous(), pages.contiguous()
    given.index, given.pages = index.data_ptr(), pages.data_ptr()
    _launch(given, macros, 2 * pool.shape[1], key.device)


def _launch(given: Arguments, macros: dict[str, int], rows: int, device: torch.device) -> None:
    """rows: of K and V, of all heads and sequences."""
    tiles_of_block = WARPS // macros["SHARERS"]
    blocks = rows * -(-given.tiles_given // tiles_of_block)
    launch = Launch(blocks, WARPS * LANES, tiles_of_block * macros["TILE_SHARED_BYTES"])
    if blocks:
        with torch.cuda.device(device):
            kernel(SOURCE, "group_pack", tuple(macros.items()), device)(launch, given)


def packs(states: tuple[Tensor, Tensor], form: GroupFormat, specs: KVSpec) -> bool:
    """True if the kernel packs such K and V, [batch, kv_heads, n, head_dim], on their device."""
    key, _ = states
    refused = reason_against(check_readable, *states) or reason_against(check, specs)
    if refused or not has_kernels(key.device):
        return False
    macros = macros_of(form, specs, key.dtype)
    needed = WARPS // macros["SHARERS"] * macros["TILE_SHARED_BYTES"]
    return needed + STATIC_SHARED_BYTES <= shared_bytes(key.device)


def check(specs: KVSpec) -> None:
    """Raise `RefusedError` for specs of groups that no kernel packs."""
    check_honoured(HONOURS, specs.key, specs.value)
    for name, spec in (("key", specs.key), ("value", specs.value)):
        # Signs have no zero-point that eta could move.
        if spec.along == "span" or (spec.eta and spec.mapping != "asymmetric"):
            raise RefusedError(f"groups have one axis, and eta a zero-point; {name} is {spec}")
        if spec.along == "tokens" and (spec.group or 0) not in (32, 64, 128):
            raise RefusedError(f"groups along tokens are packed by 32, 64 or 128; {name} is {spec}")


def macros_of(
    form: GroupFormat, specs: KVSpec, dtype: torch.dtype, decoding: bool = False
) -> dict[str, int]:
    """Macros of groups/pack.cu, except ALIGN, NORM and PAGED."""
    words_bytes = TILE * form.channels * max(form.key.bits, form.value.bits) // 8
    return {
        "CHANNELS": form.head_dim,
        "INPUT": INPUTS[dtype],
        "WARPS": WARPS,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
        "SHARERS": sharers(form, specs),
        "PAGED": 0,
        "TILE_SHARED_BYTES": tile_bytes(form.channels, dtype) + words_bytes,
        **_operand("K", form.key, specs.key, decoding),
        **_operand("V", form.value, specs.value, decoding),
    }


def sharers(form: GroupFormat, specs: KVSpec) -> int:
    """Warps that share 32 tokens: two where signs make instructions the limit.

    Of one sequence each scheduler gets few warps, long ones: they hide little of each other's waits
    and end unevenly. A warp's steps go in pairs.
    """
    signs = "asymmetric" not in (specs.key.mapping, specs.value.mapping)
    return 2 if signs and form.channels % 64 == 0 else 1


def _operand(name: str, form: Operand, spec: TensorSpec, decoding: bool) -> dict[str, int]:
    all_signs = decoding and spec.hybrid_at == "prefill"
    mapping = SYMMETRIC_HYBRID if all_signs else MAPPINGS[spec.mapping]
    return form.macros(name) | {f"{name}_MAPPING": mapping}


def _arguments(key: Tensor, value: Tensor, index: Tensor, data: Tensor, specs: KVSpec) -> Arguments:
    both, numbers = (specs.key, specs.value), ctypes.c_float * 2
    return Arguments(
        key=dense(key),
        value=dense(value),
        data=data.data_ptr(),
        kv_heads=data.shape[1],
        tiles_given=index.shape[1] // TILE,
        shrink=numbers(*(spec.shrink for spec in both)),
        eta=numbers(*(spec.eta for spec in both)),
        rest=numbers(*(1 - 2 * spec.eta for spec in both)),
    )


def _check(
    key: Tensor, value: Tensor, index: Tensor, form: GroupFormat, specs: KVSpec, data: Tensor
) -> None:
    if reason := reason_against(check, specs):
        raise ValueError(f"{reason}. Use pack_groups and to_group_records.")
    shape = (*data.shape[:2], key.shape[2], form.head_dim)
    same = key.shape == value.shape == shape and key.dtype == value.dtype
    if not same or key.dtype not in INPUTS or {key.stride(3), value.stride(3)} != {1}:
        raise ValueError(
            f"key and value must be {shape} in one of {[*INPUTS]} with consecutive "
            f"channels; got {tuple(key.shape)} {key.dtype} and {tuple(value.shape)} {value.dtype}."
        )
    multiple = max(TILE, specs.flush_tokens)
    fits = index.shape[0] == data.shape[0] and index.shape[1] % multiple == 0
    if not fits or data.shape[3] != form.own_nbytes or not data.is_contiguous():
        raise ValueError(
            f"index must take a multiple of {multiple} tokens of each sequence and data hold "
            f"contiguous records of {form.own_nbytes} bytes; got index {tuple(index.shape)} and "
            f"data {tuple(data.shape)}."
        )


def _check_codes(codes: tuple[Tiles | None, Tiles | None], form: GroupFormat, data: Tensor) -> None:
    least = data.shape[2] * form.tiles
    for tiles, operand, nbytes in zip(codes, (form.key, form.value), form.part_bytes, strict=False):
        if tiles is None:
            continue
        shape = (*data.shape[:2], tiles.shape[2], nbytes)
        fits = operand.apart and tiles.shape[2] >= least and tiles.is_contiguous()
        if not fits or tuple(tiles.shape) != shape:
            raise ValueError(
                "codes must be contiguous, of a format that has them apart, and as long as data: "
                f"{(*data.shape[:2], least, nbytes)}; got {tuple(tiles.shape)} for {operand}."
            )
