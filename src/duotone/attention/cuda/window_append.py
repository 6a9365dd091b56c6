"""One token per sequence into 16-bit windows: one launch for K and V.

The plain-torch reference is `StaticStore.write`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from duotone.attention.cuda.launch import OVERLAP
from duotone.attention.cuda.runtime import Launch, kernel

SOURCE, THREADS, VECTOR_BYTES = "window_append.cu", 256, 16


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


def appends(new: tuple[Tensor, Tensor], windows: tuple[Tensor, Tensor]) -> bool:
    """Whether the kernel can do it: equal types and widths, adjacent channels and tokens."""
    first = windows[0]
    width = first.shape[3]
    alike = all(x.dtype == first.dtype and x.shape[3] == width for x in (*new, *windows))
    adjacent = all(x.stride(3) == 1 for x in (*new, *windows))
    rows = all(x.stride(2) == width for x in windows)
    numbers = [x.data_ptr() for x in (*new, *windows)]
    numbers += [s * first.element_size() for x in (*new, *windows) for s in x.stride()[:2]]
    numbers.append(width * first.element_size())
    return alike and adjacent and rows and not any(n % VECTOR_BYTES for n in numbers)


def window_append(new: tuple[Tensor, Tensor], windows: tuple[Tensor, Tensor], at: Tensor) -> None:
    """windows[i][b, :, at[b]] = new[i][b, :, 0], on the device.

    new: K and V, [batch, kv_heads, 1, head_dim]. windows: [batch, kv_heads, tokens, head_dim].
    at: [batch] int64. What `appends` says must hold.
    """
    batch, heads, _, width = new[0].shape
    size = new[0].element_size()

    def pair(values: list[int], kind: type) -> ctypes.Array:
        return (kind * 2)(*values)

    def strides(tensors: tuple[Tensor, Tensor], axis: int) -> ctypes.Array:
        return pair([size * x.stride(axis) for x in tensors], ctypes.c_longlong)

    given = Arguments(
        new=pair([x.data_ptr() for x in new], ctypes.c_void_p),
        to=pair([x.data_ptr() for x in windows], ctypes.c_void_p),
        at=at.data_ptr(),
        new_batch=strides(new, 0),
        new_head=strides(new, 1),
        to_batch=strides(windows, 0),
        to_head=strides(windows, 1),
        kv_heads=heads,
        rows=batch * heads,
        tokens=windows[0].shape[2],
    )
    row_bytes = width * size
    threads = 2 * batch * heads * (row_bytes // VECTOR_BYTES)
    macros = {
        "ROW_BYTES": row_bytes,
        "OVERLAP": int(OVERLAP),
        "ARGUMENTS_BYTES": ctypes.sizeof(given),
    }
    launch = Launch(-(-threads // THREADS), THREADS, 0, overlap=OVERLAP)
    with torch.cuda.device(at.device):
        kernel(SOURCE, "window_append", tuple(macros.items()), at.device)(launch, given)
