"""Tokens into and within windows: one launch for K and V.

The plain-torch references are `StaticStore.write` and `cache.static.move_tokens`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from duotone.attention.cuda.shared.launch import OVERLAP
from duotone.attention.cuda.shared.runtime import Launch, entry, has_kernels, kernel
from duotone.cache.static import move_tokens

SOURCE, MOVE_SOURCE = "dense/window_append.cu", "dense/window_move.cu"
THREADS, VECTOR_BYTES = 256, 16


class Arguments(ctypes.Structure):
    """`Arguments` of window_append.cu."""

    _fields_ = (
        ("new", ctypes.c_void_p * 2),
        ("to", ctypes.c_void_p * 2),
        ("at", ctypes.c_void_p),
        *((name, ctypes.c_longlong * 2) for name in (
            "new_batch", "new_head", "to_batch", "to_head",
        )),
        ("kv_heads", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("tokens", ctypes.c_int),
    )  # fmt: skip


class MoveArguments(ctypes.Structure):
    """`Arguments` of window_move.cu."""

    _fields_ = (
        ("states", ctypes.c_void_p * 2),
        *((name, ctypes.c_void_p) for name in ("source", "target", "full")),
        *((name, ctypes.c_longlong * 2) for name in ("batch", "head")),
        *((name, ctypes.c_int) for name in ("kv_heads", "moved", "rows")),
    )


def appends(new: tuple[Tensor, Tensor], windows: tuple[Tensor, Tensor]) -> bool:
    """True if the kernel can append: one type, equal widths, adjacent channels and tokens."""
    first, width = windows[0], windows[0].shape[3]
    alike = all(x.dtype == first.dtype and x.shape[3] == width for x in (*new, *windows))
    adjacent = all(x.stride(3) == 1 for x in (*new, *windows))
    rows = all(x.stride(2) == width for x in windows)
    numbers = [x.data_ptr() for x in (*new, *windows)]
    numbers += [s * x.element_size() for x in (*new, *windows) for s in x.stride()[:2]]
    numbers.append(width * first.element_size())
    return alike and adjacent and rows and not any(n % VECTOR_BYTES for n in numbers)


def close_gap(states: tuple[Tensor, Tensor], source: Tensor, target: Tensor, full: Tensor) -> None:
    """Move dense tokens to the slots that a group has left, by the kernel where it can.

    Arguments are those of `window_move`, and of `cache.static.move_tokens` for each of `states`.
    """
    if has_kernels(full.device) and appends(states, states):
        window_move(states, source, target, full)
        return
    for x in states:
        move_tokens(x, source, target, full)


def window_append(new: tuple[Tensor, Tensor], windows: tuple[Tensor, Tensor], at: Tensor) -> None:
    """windows[i][b, :, at[b]] = new[i][b, :, 0], on the device.

    new: K and V, [batch, kv_heads, 1, head_dim]. windows: [batch, kv_heads, tokens, head_dim].
    at: [batch] int64. What `appends` says must hold.
    """
    batch, heads, _, width = new[0].shape
    given = Arguments(
        new=_addresses(new),
        to=_addresses(windows),
        at=at.data_ptr(),
        new_batch=_strides(new, 0),
        new_head=_strides(new, 1),
        to_batch=_strides(windows, 0),
        to_head=_strides(windows, 1),
        kv_heads=heads,
        rows=batch * heads,
        tokens=windows[0].shape[2],
    )
    macros = macros_of(width, windows[0].dtype)
    _launch(SOURCE, given, macros, batch * heads, at.device, overlap=OVERLAP)


def macros_of(width: int, dtype: torch.dtype) -> dict[str, int]:
    """Macros of window_append.cu, except ARGUMENTS_BYTES. width: head_dim."""
    return {"ROW_BYTES": width * dtype.itemsize, "OVERLAP": int(OVERLAP)}


def window_move(
    windows: tuple[Tensor, Tensor], source: Tensor, target: Tensor, full: Tensor
) -> None:
    """windows[i][b, :, target[b]] = windows[i][b, :, source[b]] where full[b], on the device.

    windows: [batch, kv_heads, tokens, head_dim], as `appends` wants them. source, target: [batch,
    moved] int64, without a slot in common. full: [batch] bool.
    """
    first = windows[0]
    source, target = source.contiguous(), target.contiguous()
    rows = first.shape[0] * first.shape[1] * source.shape[1]
    given = MoveArguments(
        states=_addresses(windows),
        source=source.data_ptr(),
        target=target.data_ptr(),
        full=full.data_ptr(),
        batch=_strides(windows, 0),
        head=_strides(windows, 1),
        kv_heads=first.shape[1],
        moved=source.shape[1],
        rows=rows,
    )
    macros = {"ROW_BYTES": first.shape[3] * first.element_size()}
    _launch(MOVE_SOURCE, given, macros, rows, first.device)


def _addresses(tensors: tuple[Tensor, Tensor]) -> ctypes.Array:
    return (ctypes.c_void_p * 2)(*(x.data_ptr() for x in tensors))


def _strides(tensors: tuple[Tensor, Tensor], axis: int) -> ctypes.Array:
    return (ctypes.c_longlong * 2)(*(x.element_size() * x.stride(axis) for x in tensors))


def _launch(
    source: str,
    given: ctypes.Structure,
    macros: dict[str, int],
    rows: int,
    device: torch.device,
    overlap: bool = False,
) -> None:
    """rows: of K; V has as many."""
    threads = 2 * rows * (macros["ROW_BYTES"] // VECTOR_BYTES)
    if not threads:
        return
    all_macros = macros | {"ARGUMENTS_BYTES": ctypes.sizeof(given)}
    launch = Launch(-(-threads // THREADS), THREADS, 0, overlap=overlap)
    name = entry(source)
    with torch.cuda.device(device):
        kernel(source, name, tuple(all_macros.items()), device)(launch, given)
