"""Find the levels of blocks of K or V, and the bits of each channel, on the device.

A tensor takes three launches. The first finds moments of every channel. The second finds energies
of tokens and the weighted power of channels. The third holds strips of channels in shared memory,
for Lloyd's rounds and the gain by energy. A fitted gain takes a few more launches (`levels.gain`).
No buffer is as large as the tensor.

The plain-torch reference is `classes.levels.torch_levels`. Sums have another order here, so levels
agree to about their last bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.attention.cuda.classes.format import HONOURS as READ
from duotone.attention.cuda.classes.format import WIDTHS, Classes
from duotone.attention.cuda.classes.levels import SortedLevels, States
from duotone.attention.cuda.levels.gain import TOKENS, launch_gains, room_for_gains
from duotone.attention.cuda.packing.inputs import INPUTS, Dense, alignment, check_readable, dense
from duotone.attention.cuda.shared.geometry import multiprocessors, shared_bytes
from duotone.attention.cuda.shared.runtime import Launch, kernel
from duotone.attention.cuda.spans.pack import splits_of
from duotone.attention.refused import RefusedError, reason_against
from duotone.cache import BlockTable
from duotone.quant import TensorSpec
from duotone.quant.honours import Honours

HONOURS = Honours.of(
    "kernels that find levels",
    READ.honours | {"shrink", "levels", "gain", "energy"},
    READ.bits,
    packs=True,
    params=READ.params,
)
THREADS = 256
# Shared memory of a block of threads: for all channels, and for few.
WHOLE_BYTES, STRIP_BYTES = 48 << 10, 88 << 10
STRIPS = (8, 4, 2, 1)
# Most bytes of a search in addition to its strip.
BESIDE_STRIP_BYTES = 8 << 10
# Threads of a channel, by the longest block.
LANES = {128: 8, 1024: 32}


class Arguments(ctypes.Structure):
    """`Arguments` of levels/call.cuh."""

    _fields_ = (
        ("x", Dense),
        *((name, ctypes.c_void_p) for name in (
            "offsets", "moments", "power", "weight", "fine",
            "spread", "products", "chosen_scale", "chosen_zero", "scale", "zero", "order",
        )),
        *((name, ctypes.c_int) for name in (
            "kv_heads", "blocks", "tokens", "splits", "strip_row",
            "first_row", "spread_parts", "gain_parts",
        )),
        *((name, ctypes.c_float) for name in ("energy", "gain", "shrink")),
    )  # fmt: skip


@dataclass(frozen=True)
class Strip:
    """Cut of a search. channels: of a block of threads. lanes: threads of a channel."""

    channels: int
    lanes: int

    @classmethod
    def of(cls, longest: int, head_dim: int, itemsize: int) -> Strip:
        """Choose the strip for blocks of up to `longest` tokens: all channels where they fit."""
        lanes = next((n for most, n in LANES.items() if longest <= most), THREADS)
        row_bytes = strip_row(longest, itemsize) * itemsize
        if lanes < THREADS and row_bytes * head_dim <= WHOLE_BYTES:
            return cls(head_dim, lanes)
        fitting = (n for n in STRIPS if n < head_dim and n * row_bytes <= STRIP_BYTES)
        return cls(next(fitting, 1), max(lanes, THREADS // STRIPS[0]))


def strip_row(longest: int, itemsize: int) -> int:
    """Elements between the channels of a strip: whole units of 16 bytes."""
    return -(-max(longest, 1) * itemsize // 16) * 16 // itemsize


def check(x: Tensor, spec: TensorSpec, blocks: BlockTable) -> None:
    """Raise `RefusedError` for levels that no kernel finds.

    The host may wait once per block table.
    """
    if reason := HONOURS.refusal(spec):
        raise RefusedError(f"{reason} in {spec}")
    check_readable(x)
    most = shared_bytes(x.device) - BESIDE_STRIP_BYTES
    if strip_row(blocks.longest, x.itemsize) * x.itemsize > most:
        raise RefusedError(f"a channel of {blocks.longest} tokens does not fit shared memory")
    if spec.gain == "fit" and not room_for_gains(x.shape[3], x.device):
        raise RefusedError(
            f"{TOKENS} tokens of {x.shape[3]} channels do not fit shared memory twice"
        )


def find_levels(x: States, spec: TensorSpec, blocks: BlockTable) -> SortedLevels:
    """Find levels of the blocks of x, as `torch_levels` does.

    Numbers that are not finite give levels that are not finite. The host waits once per table.
    Errors: ValueError for what `check` refuses.
    """
    if reason := reason_against(check, x, spec, blocks):
        raise ValueError(f"the search for levels: {reason}. Use torch_levels.")
    classes = Classes.of(spec, x.shape[3])
    found = SortedLevels.empty(blocks, x.shape[:2], x.shape[3], classes.channels)
    if found.order.numel():
        _search(x, spec, classes, found)
    return found


def _search(x: States, spec: TensorSpec, classes: Classes, found: SortedLevels) -> None:
    blocks, channels = found.blocks, x.shape[3]
    rows = found.zero.numel() // channels
    splits = splits_of(blocks.longest, rows, multiprocessors(x.device))
    room = _workspace(x, spec, rows, splits)
    offsets = blocks.offsets.contiguous()
    given = Arguments(
        x=dense(x),
        offsets=offsets.data_ptr(),
        **{name: part.data_ptr() for name, part in room.items()},
        **{name: getattr(found, name).data_ptr() for name in (
            "chosen_scale", "chosen_zero", "scale", "zero", "order",
        )},
        kv_heads=x.shape[1], blocks=blocks.blocks, tokens=x.shape[2], splits=splits,
        strip_row=strip_row(blocks.longest, x.itemsize),
        energy=spec.energy,
        gain=1.0 if spec.gain == "fit" else spec.gain,
        shrink=spec.shrink,
    )  # fmt: skip
    macros = macros_of(spec, classes, channels, x.dtype, alignment(x))

    def run(source: str, name: str, more: dict[str, int], at: Launch) -> None:
        kernel(source, name, tuple((macros | more).items()), x.device)(at, given)

    with torch.cuda.device(x.device):
        for launch in _launches(x, spec, blocks.longest, rows, splits):
            run(*launch)
        if spec.gain == "fit":
            sms = multiprocessors(x.device)
            launch_gains(given, run, rows, blocks.longest, channels, THREADS, x.device, sms)


def _workspace(x: States, spec: TensorSpec, rows: int, splits: int) -> dict[str, Tensor]:
    """Parts of one buffer, small next to x, for what launches leave to others."""
    channels = rows * x.shape[3]
    sizes = {"moments": 2 * splits * channels, "power": splits * channels}
    if spec.gain == "fit":
        sizes["fine"] = 3 * channels
    if spec.energy:
        sizes["weight"] = x.shape[:3].numel()
    room = x.new_empty(sum(sizes.values()), dtype=torch.float32)
    return dict(zip(sizes, room.split(list(sizes.values())), strict=True))


def _launches(
    x: States, spec: TensorSpec, longest: int, rows: int, splits: int
) -> list[tuple[str, str, dict[str, int], Launch]]:
    """(source, kernel, own macros, grid) of all launches except those for gains."""
    channels = x.shape[3]
    sums = Launch(rows * splits, THREADS, 0)
    launches = [("levels/sums.cu", "level_moments", {}, sums)]
    if spec.classes or spec.energy:
        launches.append(("levels/sums.cu", "level_energies", {}, sums))
    strip = Strip.of(longest, channels, x.itemsize)
    nbytes = strip.channels * strip_row(longest, x.itemsize) * x.itemsize
    search = Launch(rows * -(-channels // strip.channels), THREADS, nbytes)
    launches.append(("levels/search.cu", "level_search", search_macros(strip), search))
    return launches


def search_macros(strip: Strip) -> dict[str, int]:
    """Macros of levels/search.cu in addition to those of all sources."""
    return {"STRIP": strip.channels, "LANES": strip.lanes}


def macros_of(
    spec: TensorSpec, classes: Classes, head_dim: int, dtype: torch.dtype, align: int
) -> dict[str, int]:
    """Macros of all sources."""
    gain = {1.0: 0, "fit": 2}.get(spec.gain, 1)
    return {
        "CHANNELS": head_dim,
        "D": head_dim,
        **{f"N{bits}": classes.width(bits) for bits in WIDTHS},
        "RANKED": int(spec.classes is not None),
        "LLOYD": int(spec.levels == "lloyd"),
        "ENERGY": int(bool(spec.energy)),
        "GAIN": gain,
        "INPUT": INPUTS[dtype],
        "ALIGN": align,
        "THREADS": THREADS,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }
