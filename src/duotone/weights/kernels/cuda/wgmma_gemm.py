"""W8A8 by Hopper's warpgroup products: launches of cuda/wgmma_gemm.cu."""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache

import torch
from torch import Tensor

from duotone.tools.devices import facts
from duotone.tools.nvrtc import Kernel, Launch, Sources, has_compiler
from duotone.weights.kernels.cuda.wgmma_tiles import GROUP_OUTS, STEP, WgmmaTile, best_tile
from duotone.weights.kernels.devices import multiprocessors
from duotone.weights.modules.packed_weight import PackedWeight

SOURCE = "wgmma_gemm.cu"
# Its products exist on this capability alone.
CAPABILITY, FEATURES = (9, 0), "a"
TYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
NO_TYPE = 3
MAP_BYTES, ALIGNMENT_BYTES = 128, 64
GROUP_THREADS = 128
# Registers of a thread that multiplies, by warpgroups that do.
REGISTERS = {1: 240, 2: 240, 3: 160}
# Up to so many tokens, a launch begins while the previous launch ends. Beyond, its blocks take what
# the previous launch's last blocks need: chains of 2,048 tokens and more were up to 17 % slower.
MAX_OVERLAP_TOKENS = 1024
# TMA wants addresses and rows of multiples of 16 bytes, and eight outs are stored at one time.
START_BYTES, IN_MULTIPLE, OUT_MULTIPLE = 16, 16, 8
# Descriptions that are kept: of all weights of a model and of the buffers of its inputs.
_MAX_MAPS = 1 << 14
_sources = Sources("duotone.weights.kernels.cuda")


class Arguments(ctypes.Structure):
    """`Arguments` of wgmma_gemm.cu, filled up to its alignment."""

    _fields_ = (
        *((name, ctypes.c_ubyte * MAP_BYTES) for name in ("w", "x", "up")),
        *((name, ctypes.c_void_p) for name in (
            "y", "row_scale", "out_scale", "up_scale", "x0", "w0", "bias", "up_bias",
        )),
        *((name, ctypes.c_int) for name in (
            "tokens", "outs", "steps", "tiles_t", "tiles_o", "tiles", "x_bytes",
        )),
        ("factor", ctypes.c_float),
        ("filling", ctypes.c_ubyte * 32),
    )  # fmt: skip


def missing(device: torch.device) -> str | None:
    """Reason why these kernels cannot run on a device, or None."""
    if device.type != "cuda":
        return f"warpgroup products need a CUDA device; got {device}"
    capability = facts(device).capability
    if capability != CAPABILITY:
        return f"warpgroup products are of compute capability {CAPABILITY}; got {capability}"
    return None if has_compiler() else "they need `pip install duotone[cuda]` (cuda-core)"


def unsupported(weight: PackedWeight) -> str | None:
    """Reason why this weight's codes cannot be multiplied so, or None."""
    outs, ins = weight.shape
    if ins % IN_MULTIPLE or outs % OUT_MULTIPLE or outs < GROUP_OUTS:
        return (
            f"it takes columns in multiples of {IN_MULTIPLE}, channels in multiples of "
            f"{OUT_MULTIPLE}, {GROUP_OUTS} at least; got [{outs}, {ins}]"
        )
    return None if weight.group_size is None else "it adds up whole rows; got groups of columns"


def gemm_wgmma(
    x_q: Tensor,
    row_scale: Tensor,
    codes: Tensor,
    weight: PackedWeight,
    x0: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tile: WgmmaTile | None = None,
) -> Tensor:
    """Launch: int8 x_q [tokens, in] and codes [out, in], contiguous; fills `out` and returns it.

    weight: where scales and split column come from. codes: its own, or, of a weight of 4 bits, its
    codes times 16. tile: the best by prediction if None.
    Errors: ValueError where codes or `out` do not begin at a multiple of 16 bytes.
    """
    check_starts(x_q=x_q, codes=codes, out=out)
    tile = tile or best_tile(x_q.shape[0], *codes.shape, multiprocessors(x_q.device))
    optional = {"x0": x0, "w0": weight.w0, "bias": bias}
    tensors = {"y": out, "row_scale": row_scale, "out_scale": weight.scale, **optional}
    given = arguments_of(tile, x_q, codes, tensors, 1.0 if weight.bits == 8 else 0.0625)
    types = {name: type_of(tensor) for name, tensor in optional.items()}
    launch(tile, given, x_q, out=TYPES[out.dtype], per_row=row_scale.numel() > 1, **types)
    return out


def launch(tile: WgmmaTile, given: Arguments, x_q: Tensor, **kinds: int) -> None:
    """Compile, if it is new, and launch where x_q is. kinds: of `macros_of`, but for `overlap`."""
    at = Launch(
        min(given.tiles, multiprocessors(x_q.device)),
        (tile.groups + 1) * GROUP_THREADS,
        tile.stages * tile.step_bytes,
        overlap=overlaps(x_q),
    )
    _kernel(tile, x_q.device, overlap=at.overlap, **kinds)(at, given)


@cache
def _kernel(tile: WgmmaTile, device: torch.device, **kinds: int) -> Kernel:
    name, macros = SOURCE.removesuffix(".cu"), macros_of(tile, **kinds)
    return _sources.kernel(SOURCE, name, tuple(macros.items()), device, FEATURES)


def overlaps(x_q: Tensor) -> bool:
    """True if a launch for these tokens begins while the previous launch ends."""
    return x_q.shape[0] <= MAX_OVERLAP_TOKENS


def type_of(tensor: Tensor | None) -> int:
    """Number of a tensor's type in the source."""
    return NO_TYPE if tensor is None else TYPES[tensor.dtype]


def check_starts(**tensors: Tensor) -> None:
    """Raise ValueError for memory that does not begin at a multiple of START_BYTES."""
    for name, tensor in tensors.items():
        if tensor.data_ptr() % START_BYTES:
            raise ValueError(
                f"{name} must begin at a multiple of {START_BYTES} bytes; got address "
                f"{tensor.data_ptr():#x}. Take a copy of it (.clone())."
            )


def arguments_of(
    tile: WgmmaTile,
    x_q: Tensor,
    codes: Tensor,
    tensors: dict[str, Tensor | None],
    factor: float,
    up: Tensor | None = None,
) -> Arguments:
    """tensors: by names of addresses in `Arguments`. up: codes, where `codes` are a gate's."""
    tokens, ins = x_q.shape
    rows, tiles_t = min(tokens, tile.tokens), -(-tokens // tile.tokens)
    written = tile.outs if up is None else tile.outs // 2
    outs = codes.shape[0]
    tiles_o = -(-outs // written)
    maps = {} if up is None else {"up": _tensor_map(up, written)}
    return Arguments(
        w=_tensor_map(codes, written),
        x=_tensor_map(x_q, rows),
        **maps,
        **{name: None if t is None else t.data_ptr() for name, t in tensors.items()},
        tokens=tokens,
        outs=outs,
        steps=-(-ins // STEP),
        tiles_t=tiles_t,
        tiles_o=tiles_o,
        tiles=tiles_t * tiles_o,
        x_bytes=rows * STEP,
        factor=factor,
    )


def macros_of(
    tile: WgmmaTile,
    out: int = TYPES[torch.bfloat16],
    per_row: bool = False,
    overlap: bool = True,
    x0: int = NO_TYPE,
    w0: int = NO_TYPE,
    bias: int = NO_TYPE,
    gated: int = 0,
) -> dict[str, int]:
    """Macros that the source is compiled with; out, x0, w0, bias: numbers of TYPES."""
    registers = tile.tokens // 2
    return {
        "N": tile.tokens,
        "SIXTEENS": tile.tokens // 16,
        "A_OPERAND": registers,
        "B_OPERAND": registers + 1,
        "D_OPERAND": registers + 2,
        "WGS": tile.groups,
        "SUB_BLOCKS": tile.sub_blocks,
        "ROWS": tile.rows,
        "STAGES": tile.stages,
        "REGISTERS": REGISTERS[tile.groups],
        "OUT": out,
        "X0": x0,
        "W0": w0,
        "BIAS": bias,
        "PER_ROW": int(per_row),
        "GATED": gated,
        "OVERLAP": int(overlap),
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }


def _tensor_map(codes: Tensor, box_rows: int) -> ctypes.Array[ctypes.c_ubyte]:
    return _encoded(codes.data_ptr(), *codes.shape, box_rows)


@lru_cache(maxsize=_MAX_MAPS)
def _encoded(address: int, rows: int, columns: int, box_rows: int) -> ctypes.Array[ctypes.c_ubyte]:
    """TMA's description of int8 [rows, columns] in swizzled boxes of [box_rows, STEP]."""
    from cuda.bindings import driver

    size, side = driver.cuuint64_t, driver.cuuint32_t
    error, found = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        2,
        address,
        [size(columns), size(rows)],
        [size(columns)],
        [side(STEP), side(box_rows)],
        [side(1), side(1)],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if int(error) != 0:
        raise RuntimeError(f"cuTensorMapEncodeTiled failed: {error}.")
    return (ctypes.c_ubyte * MAP_BYTES)(*ctypes.string_at(found.getPtr(), MAP_BYTES))
