"""K and V of ragged chunks: what rings hold before the new tokens, and what goes into rings.

One launch for K and V of all requests. The plain-torch references, with equal arguments, are
`opened_by_torch` and `kept_by_torch`.
"""

from __future__ import annotations

import ctypes

import torch
from jaxtyping import Float, Int
from torch import Tensor

from duotone.attention.cuda.shared.runtime import Launch, kernel

SOURCE = "dense/ring_rows.cu"
THREADS, VECTOR_BYTES = 256, 16
States = Float[Tensor, "tokens kv_heads head_dim"]
Rows = Float[Tensor, "rows head_dim"]


class Arguments(ctypes.Structure):
    """`Arguments` of ring_rows.cu."""

    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("states", ctypes.c_void_p * 2),
        ("buffer", ctypes.c_void_p * 2),
        ("at", ctypes.c_void_p),
        ("token", ctypes.c_void_p),
        ("states_token", ctypes.c_longlong * 2),
        ("states_head", ctypes.c_longlong * 2),
        ("kv_heads", ctypes.c_int),
        ("count", ctypes.c_int),
    )


def open_rows(
    rows: Rows, new: tuple[States, States], at: Int[Tensor, " count"], room: int
) -> tuple[States, States]:
    """K and V of tokens, each a new one or, where `at` is negative, from ring row `~at`.

    rows: a pool in 16 bit; a page of a kv head has `room` rows of K, then of V. at: int64; ring
    rows are K's of kv head 0. Errors: ValueError for types and strides that are not read.
    """
    shape = (len(at), *new[0].shape[1:])
    buffer = tuple(torch.empty(shape, dtype=x.dtype, device=x.device) for x in new)
    _launch(rows, new, at, room, buffer=buffer)
    return buffer


def keep_rows(
    rows: Rows,
    states: tuple[States, States],
    token: Int[Tensor, " count"],
    at: Int[Tensor, " count"],
    room: int,
) -> None:
    """Put tokens `token` of K and V into ring rows `~at`; nowhere where `at` is 0 or above.

    rows, at, room, errors: as of `open_rows`.
    """
    _launch(rows, states, at, room, token=token)


def opened_by_torch(
    rows: Rows, new: tuple[States, States], at: Int[Tensor, " count"], room: int
) -> tuple[States, States]:
    """Reference of `open_rows`."""
    heads = torch.arange(new[0].shape[1], device=at.device)
    fresh = [x[at.clamp_min(0)] for x in new]
    ring = (~at).clamp_min(0)[:, None] + 2 * heads * room
    taken = (rows[ring], rows[ring + room])
    return tuple(
        torch.where((at < 0)[:, None, None], old, x) for old, x in zip(taken, fresh, strict=True)
    )


def kept_by_torch(
    rows: Rows,
    states: tuple[States, States],
    token: Int[Tensor, " count"],
    at: Int[Tensor, " count"],
    room: int,
) -> None:
    """Reference of `keep_rows`."""
    kept, heads = at < 0, torch.arange(states[0].shape[1], device=at.device)
    ring = (~at[kept])[:, None] + 2 * heads * room
    for which, x in enumerate(states):
        rows[ring + which * room] = x[token[kept]]


def _launch(
    rows: Tensor,
    states: tuple[Tensor, Tensor],
    at: Tensor,
    room: int,
    *,
    buffer: tuple[Tensor, Tensor] | None = None,
    token: Tensor | None = None,
) -> None:
    heads, width = states[0].shape[1:]
    macros = macros_of(width, rows.dtype, room, opening=token is None)
    _check(rows, states)
    threads = len(at) * heads * (macros["ROW_BYTES"] // VECTOR_BYTES)
    if not threads:
        return
    given = Arguments(rows=rows.data_ptr(), at=at.data_ptr(), kv_heads=heads, count=len(at))
    given.token = None if token is None else token.data_ptr()
    given.buffer[:] = [x.data_ptr() for x in buffer] if buffer else [None] * 2
    given.states[:] = [x.data_ptr() for x in states]
    given.states_token[:], given.states_head[:] = (
        [x.stride(axis) * x.itemsize for x in states] for axis in (0, 1)
    )
    launch = Launch(-(-threads // THREADS), THREADS, 0)
    with torch.cuda.device(rows.device):
        kernel(SOURCE, "ring_rows", tuple(macros.items()), rows.device)(launch, given)


def _check(rows: Tensor, states: tuple[Tensor, Tensor]) -> None:
    width = rows.shape[1]
    alike = all(x.dtype == rows.dtype and x.shape[2] == width for x in states)
    numbers = [rows.data_ptr(), width * rows.itemsize, *(x.data_ptr() for x in states)]
    numbers += [stride * x.itemsize for x in states for stride in x.stride()[:2]]
    close = all(x.stride(2) == 1 for x in states) and rows.is_contiguous()
    if not alike or not close or any(n % VECTOR_BYTES for n in numbers):
        raise ValueError(
            f"K and V must have {width} adjacent channels of {rows.dtype}, and strides of whole "
            f"{VECTOR_BYTES} bytes; got {[(x.dtype, x.shape, x.stride()) for x in states]}. Make "
            "them contiguous."
        )


def macros_of(width: int, dtype: torch.dtype, room: int, opening: bool) -> dict[str, int]:
    """Macros of ring_rows.cu. width: head_dim."""
    return {
        "ROW_BYTES": width * dtype.itemsize,
        "ROOM": room,
        "OPEN": int(opening),
        "THREADS": THREADS,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }
