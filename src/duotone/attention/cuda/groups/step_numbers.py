"""Where the tokens of a decode step go and which tokens they see, in pages: one launch a step.

The plain-torch reference, with equal arguments, is `numbers_by_torch`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from duotone.attention.cuda.shared.runtime import Launch, kernel

SOURCE = "groups/step_numbers.cu"
THREADS = 128
# Most tables that name the pages of rings.
TABLES = 8


class Table(ctypes.Structure):
    """`Table` of step_numbers.cu."""

    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("stride", ctypes.c_longlong),
        ("columns", ctypes.c_longlong),
    )


class Arguments(ctypes.Structure):
    """`Arguments` of step_numbers.cu."""

    _fields_ = (
        ("lengths", ctypes.c_void_p),
        ("pages", Table),
        ("rings", Table * TABLES),
        *((name, ctypes.c_void_p) for name in ("slots", "packed", "dense", "position")),
        *((name, ctypes.c_void_p) for name in ("full", "ring_pages")),
        ("count", ctypes.c_longlong),
    )


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of up to `most` requests, in tensors that stay.

    packed, dense: tokens in pages before the step, and after them, the new one included. position:
    of the new token; -1: it is not kept. full: the page that it completes; 0, the page of nobody,
    for none. rings: pages of the requests' rings.
    """

    packed: Int[Tensor, " most"]
    dense: Int[Tensor, " most"]
    position: Int[Tensor, " most"]
    full: Int[Tensor, " most"]
    rings: Int[Tensor, "most pages_per_ring"]

    @classmethod
    def zeros(cls, most: int, pages_per_ring: int, device: torch.device) -> StepNumbers:
        """Numbers of no requests."""
        numbers = torch.zeros(3, most, dtype=torch.long, device=device)
        full = torch.zeros(most, dtype=torch.int32, device=device)
        return cls(*numbers, full, full[:, None].repeat(1, pages_per_ring))


def step_numbers(
    lengths: Int[Tensor, " count"],
    pages: Int[Tensor, "count width"],
    rings: Sequence[Int[Tensor, "count columns"]],
    slots: Int[Tensor, " count"],
    tokens: int,
    into: StepNumbers,
) -> None:
    """Work out the numbers of a step.

    lengths: tokens of each request with the new one; 0: a row that fills up the batch. pages: those
    of each. rings: tables that together name the pages of its ring, and may name more. slots:
    int64, below 0 where the new token is not kept. tokens: of a page. All else is int32. Nothing
    here waits for the device. Errors: ValueError for other types, and rows that are not contiguous.
    """
    _check((lengths, pages, *rings), slots)
    width, count = into.rings.shape[1], len(lengths)
    given = Arguments(
        lengths=lengths.data_ptr(),
        pages=_table(pages),
        slots=slots.data_ptr(),
        packed=into.packed.data_ptr(),
        dense=into.dense.data_ptr(),
        position=into.position.data_ptr(),
        full=into.full.data_ptr(),
        ring_pages=into.rings.data_ptr(),
        count=count,
    )
    for number, table in enumerate(rings):
        given.rings[number] = _table(table)
    launch = Launch(-(-count // THREADS), THREADS, 0)
    if count:
        with torch.cuda.device(lengths.device):
            macros = tuple(macros_of(tokens, width).items())
            kernel(SOURCE, "step_numbers", macros, lengths.device)(launch, given)


def numbers_by_torch(
    lengths: Int[Tensor, " count"],
    pages: Int[Tensor, "count width"],
    rings: Sequence[Int[Tensor, "count columns"]],
    slots: Int[Tensor, " count"],
    tokens: int,
    into: StepNumbers,
) -> None:
    """Reference of `step_numbers`."""
    at, count = lengths.long() - 1, len(lengths)
    whole = at.clamp_min(0) // tokens
    kept = (slots[:count] >= 0) & (at >= 0)
    full = kept & (at % tokens == tokens - 1)
    page = pages.gather(1, whole[:, None])[:, 0]
    named = torch.cat([table[:count] for table in rings], 1)[:, : into.rings.shape[1]]
    into.packed[:count] = whole * tokens
    into.dense[:count] = at + 1 - whole * tokens
    into.position[:count] = torch.where(kept, at, -1)
    into.full[:count] = torch.where(full, page, 0)
    into.rings[:count] = torch.where(kept[:, None], named, 0)


def macros_of(tokens: int, pages_per_ring: int) -> dict[str, int]:
    """Macros of step_numbers.cu. tokens: of a page."""
    return {
        "TOKENS": tokens,
        "RINGS": pages_per_ring,
        "TABLES": TABLES,
        "THREADS": THREADS,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }


def _table(pages: Tensor) -> Table:
    return Table(pages.data_ptr(), pages.stride(0), pages.shape[1])


def _check(numbers: Sequence[Tensor], slots: Tensor) -> None:
    rows = all(x.dtype == torch.int32 and x.stride(-1) == 1 for x in numbers)
    if not rows or slots.dtype != torch.int64 or slots.stride(0) != 1 or len(numbers) > TABLES + 2:
        raise ValueError(
            f"numbers of a step must be int32 with adjacent columns, in at most {TABLES} tables of "
            f"rings, and slots int64; got {[(x.dtype, x.stride()) for x in (*numbers, slots)]}. "
            "Convert them."
        )
