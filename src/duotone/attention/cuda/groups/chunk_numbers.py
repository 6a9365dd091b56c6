"""Where the tokens of chunks go and which tokens they see, in pages: one launch a step.

The plain-torch reference, with equal arguments, is `numbers_by_torch`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from jaxtyping import Int
from torch import Tensor

from duotone.attention.cuda.shared.runtime import Launch, kernel

SOURCE = "groups/chunk_numbers.cu"
THREADS = 512
# Numbers of `Request` in chunk_numbers.cu.
REQUEST_NUMBERS = 11


class Arguments(ctypes.Structure):
    """`Arguments` of chunk_numbers.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("requests", "table", "blocks")),
        *((name, ctypes.c_longlong) for name in ("table_stride", "blocks_stride")),
        *((name, ctypes.c_void_p) for name in ("slots", "opened", "rest", "rest_at", "full")),
        *((name, ctypes.c_void_p) for name in ("pages", "past")),
    )


@dataclass(frozen=True)
class Pages:
    """Sizes. tokens: of a page. ring_rows: 16-bit tokens that it holds. rings: pages of a ring."""

    tokens: int
    ring_rows: int
    rings: int
    kv_heads: int


@dataclass(frozen=True)
class Requests:
    """Requests with new tokens, one after the other, by numbers that the host has.

    rows: of the tables. new, before: tokens of each. far: pages before that windows read. tokens:
    of a page.
    """

    rows: Sequence[int]
    new: Sequence[int]
    before: Sequence[int]
    far: Sequence[int]
    tokens: int

    @cached_property
    def tails(self) -> list[int]:
        """Tokens in rings."""
        return [before % self.tokens for before in self.before]

    @cached_property
    def opened(self) -> list[int]:
        """Tokens after the last whole page: those of rings, then new ones."""
        return [tail + new for tail, new in zip(self.tails, self.new, strict=True)]

    @cached_property
    def full(self) -> list[int]:
        """Pages that become full."""
        return [opened // self.tokens for opened in self.opened]

    @cached_property
    def rest(self) -> list[int]:
        """Tokens after these pages."""
        return [opened % self.tokens for opened in self.opened]

    @property
    def numbers(self) -> list[int]:
        """All numbers of each `Request` in chunk_numbers.cu, request after request."""
        first, start, page, rest, window = (
            [0, *accumulate(counts)][:-1]
            for counts in (self.new, self.opened, self.full, self.rest, self.far)
        )
        past = [before // self.tokens for before in self.before]
        counts = (self.tails, self.opened, past, self.full, page, rest, self.far, window)
        return [
            x for request in zip(self.rows, first, start, *counts, strict=True) for x in request
        ]


@dataclass(frozen=True)
class ChunkNumbers:
    """Numbers of opened tokens: those of a request's ring, then its new ones.

    opened: int64, a new token each, or the complement of a ring row; None: no ring is read. rest:
    int64, those that go into rings. rest_at: int64, the complements of their rows; 0 for none.
    full: int64, those of full pages. pages: int32, where they go; 0 for none. past: int32, pages
    that windows read.
    """

    opened: Int[Tensor, " opened"] | None
    rest: Int[Tensor, " rest"]
    rest_at: Int[Tensor, " rest"]
    full: Int[Tensor, " page_tokens"]
    pages: Int[Tensor, " pages"]
    past: Int[Tensor, " past"]


def chunk_numbers(
    requests: Requests,
    numbers: Int[Tensor, "requests fields"],
    table: Int[Tensor, "rows width"],
    blocks: Int[Tensor, "rows rings"],
    slots: Int[Tensor, " new"],
    pages: Pages,
) -> ChunkNumbers:
    """Work out the numbers of a step.

    numbers: int32, those of `requests`. table, blocks: int32, pages of each row; those of its ring.
    slots: int64, of each new token; below 0 where it is not kept. Nothing here waits for the
    device. Errors: ValueError for other types, and rows that are not contiguous.
    """
    _check(numbers, table, blocks, slots)
    device, reads_rings = table.device, any(requests.tails)
    opened, rest, full = (sum(x) for x in (requests.opened, requests.rest, requests.full))
    sizes = [opened if reads_rings else 0, rest, rest, full * pages.tokens]
    parts = torch.empty(sum(sizes), dtype=torch.long, device=device).split(sizes)
    sizes = [full, sum(requests.far)]
    few = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    given = Arguments(table_stride=table.stride(0), blocks_stride=blocks.stride(0))
    names = ("requests", "table", "blocks", "slots", "opened", "rest", "rest_at", "full")
    tensors = (numbers, table, blocks, slots, *parts, *few)
    for name, x in zip((*names, "pages", "past"), tensors, strict=True):
        setattr(given, name, x.data_ptr())
    if not reads_rings:
        given.opened = None
    launch = Launch(len(numbers), THREADS, 0)
    with torch.cuda.device(device):
        kernel(SOURCE, "chunk_numbers", tuple(macros_of(pages).items()), device)(launch, given)
    return ChunkNumbers(parts[0] if reads_rings else None, *parts[1:], *few)


def numbers_by_torch(
    requests: Requests,
    numbers: Int[Tensor, "requests fields"],
    table: Int[Tensor, "rows width"],
    blocks: Int[Tensor, "rows rings"],
    slots: Int[Tensor, " new"],
    pages: Pages,
) -> ChunkNumbers:
    """Reference of `chunk_numbers`."""
    row, first, start, tail, opened, past, full, *_ = numbers.long().T
    far, tokens, rest = numbers.long()[:, 9], pages.tokens, opened - full * pages.tokens
    kept, blocks = slots[first] >= 0, blocks[row].long()

    owner, within = _spread(opened)
    ring = _ring_rows(blocks[owner], past[owner] * tokens + within, pages)
    fresh = first[owner] + within - tail[owner]
    old_or_new = torch.where(within < tail[owner], ~ring, fresh) if any(requests.tails) else None

    owner, within = _spread(rest)
    after = full[owner] * tokens + within
    ring = _ring_rows(blocks[owner], past[owner] * tokens + after, pages)
    into_rings = (start[owner] + after, torch.where(kept[owner], ~ring, 0))

    owner, within = _spread(full)
    page = torch.where(kept[owner], table[row[owner], past[owner] + within], 0).int()
    index = (start[owner] + within * tokens)[:, None] + torch.arange(tokens, device=row.device)
    owner, within = _spread(far)
    seen = table[row[owner], within].int()
    return ChunkNumbers(old_or_new, *into_rings, index.flatten(), page, seen)


def macros_of(pages: Pages) -> dict[str, int]:
    """Macros of chunk_numbers.cu."""
    return {
        "TOKENS": pages.tokens,
        "KV_HEADS": pages.kv_heads,
        "ROOM": pages.ring_rows,
        "RINGS": pages.rings,
        "THREADS": THREADS,
        "ARGUMENTS_BYTES": ctypes.sizeof(Arguments),
    }


def _spread(counts: Tensor) -> tuple[Tensor, Tensor]:
    """(request, number in it) of all things that requests have `counts` of."""
    requests = torch.arange(len(counts), device=counts.device)
    owner = torch.repeat_interleave(requests, counts)
    begin = counts.cumsum(0) - counts
    return owner, torch.arange(len(owner), device=counts.device) - begin[owner]


def _ring_rows(blocks: Tensor, positions: Tensor, pages: Pages) -> Tensor:
    """Rows of K of head 0."""
    slots = positions % (pages.rings * pages.ring_rows)
    block = blocks.gather(1, (slots // pages.ring_rows)[:, None])[:, 0]
    return block * pages.kv_heads * 2 * pages.ring_rows + slots % pages.ring_rows


def _check(numbers: Tensor, table: Tensor, blocks: Tensor, slots: Tensor) -> None:
    rows = all(x.dtype == torch.int32 and x.stride(1) == 1 for x in (numbers, table, blocks))
    shaped = numbers.is_contiguous() and numbers.shape[1] == REQUEST_NUMBERS
    if not rows or not shaped or slots.dtype != torch.int64 or slots.stride(0) != 1:
        raise ValueError(
            f"numbers of chunks must be int32 with adjacent columns, {REQUEST_NUMBERS} of a "
            f"request, and slots int64; got {[(x.dtype, x.shape) for x in (numbers, slots)]}, "
            f"{[(x.dtype, x.stride()) for x in (table, blocks)]}. Convert them."
        )
