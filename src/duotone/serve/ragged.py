"""Chunks of many requests by kernels: opened, packed and attended together; nothing asks the host.

The plain-torch reference is `pages.Chunk`, request by request. Numbers that all layers share are
worked out once per step. Without kernels all is done by plain torch, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.attention.cuda.dense.ring_rows import (
    keep_rows,
    kept_by_torch,
    open_rows,
    opened_by_torch,
)
from duotone.attention.cuda.groups.chunk_numbers import (
    REQUEST_NUMBERS,
    Pages,
    Requests,
    chunk_numbers,
    numbers_by_torch,
)
from duotone.attention.cuda.groups.pack import page_pack
from duotone.attention.cuda.groups.unpack import check, group_unpack
from duotone.attention.cuda.shared.merge_into import merge_into, merged_by_torch
from duotone.attention.cuda.shared.runtime import has_kernels
from duotone.attention.refused import reason_against
from duotone.serve.pages import PageLayout, read_pages, write_pages
from duotone.serve.short import ShortChunks, short_rows
from duotone.serve.windows import Attention, Window, on_device, windows_of

# Rows of a step: (row, first token, end, tokens before).
Row = tuple[int, int, int, int]


def refusal(layout: PageLayout) -> str | None:
    """Reason why chunks of a layer are done one by one, or None."""
    if layout.dtype not in (torch.float16, torch.bfloat16):
        return f"chunks are served together in 16 bit; got {layout.dtype}"
    return reason_against(check, layout.form, layout.dtype)


class RaggedStep:
    """Where the new tokens of a step go and what they see, for all layers of one layout.

    group: q heads of a kv head. rows: requests with new tokens, one after the other. table:
    [requests, width], pages of each row. blocks: [requests, rings], those of its ring. slots: of
    each token of the batch, below 0 where it is not kept.
    """

    def __init__(
        self,
        layout: PageLayout,
        kv_heads: int,
        group: int,
        rows: Sequence[Row],
        table: Tensor,
        blocks: Tensor,
        slots: Tensor,
    ) -> None:
        self.layout, tokens, device = layout, layout.tokens, table.device
        self.first, self.end = rows[0][1], rows[-1][2]
        new = [end - first for _, first, end, _ in rows]
        numbers, _, _, before = zip(*rows, strict=True)
        past, short = [count // tokens for count in before], short_rows(new, group)
        self.short = None
        if any(past[:short]):
            owners = (new[:short], past[:short], numbers[:short])
            self.short = ShortChunks(layout, group, *owners, table)
        requests = Requests(numbers, new, before, [0] * short + past[short:], tokens)
        cuts, seen = windows_of(requests.far, new, tokens)
        given, *lengths = on_device(requests.numbers, [new, requests.opened, *seen], device)
        self.queries, self.keys, *seen = lengths
        pairs = zip(cuts, seen[::2], seen[1::2], strict=True)
        self.windows = [Window(*cut, *both) for cut, *both in pairs]
        pages = Pages(tokens, layout.ring_rows, layout.rings, kv_heads)
        call = chunk_numbers if has_kernels(device) else numbers_by_torch
        numbers = given.view(-1, REQUEST_NUMBERS)
        self.numbers = call(requests, numbers, table, blocks, slots[self.first :], pages)

    def open(self, pool: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of open pages, then of new tokens, request after request, [n, H, D].

        key, value: [T, H, D], of the new tokens.
        """
        if self.numbers.opened is None:
            return key, value
        call = open_rows if has_kernels(pool.device) else opened_by_torch
        rows = self.layout.rows(pool)
        return call(rows, (key, value), self.numbers.opened, self.layout.ring_rows)

    def keep(self, pool: Tensor, opened: tuple[Tensor, Tensor]) -> None:
        """Pack the pages that are full now, and put the rest into rings."""
        layout, step = self.layout, self.numbers
        rest = (step.rest, step.rest_at, layout.ring_rows)
        if has_kernels(pool.device):
            states = (x.transpose(0, 1)[None] for x in opened)
            given = (step.full[None], step.pages, layout.form, layout.spec, layout.records(pool))
            if len(step.pages):
                page_pack(*states, *given)
            keep_rows(layout.rows(pool), opened, *rest)
            return
        kept = step.pages > 0
        full = step.full.view(-1, layout.tokens)[kept].flatten()
        if len(full):
            write_pages(layout, pool, step.pages[kept], *(x[full] for x in opened))
        kept_by_torch(layout.rows(pool), opened, *rest)

    def attend(
        self,
        pool: Tensor,
        query: Tensor,
        opened: tuple[Tensor, Tensor],
        scratch: Tensor,
        scale: float,
        attention: Attention,
    ) -> Tensor:
        """Attention of the new tokens over all, [T, Hq, D].

        query: [T, Hq, D]. scratch: of `prepared.scratch_of`. Past pages count as they are packed.
        """
        out, lse = attention(query, *opened, self.queries, self.keys, scale, True)
        if not self.windows and self.short is None:
            return out
        sums, merge = out.float(), merge_into if has_kernels(pool.device) else merged_by_torch
        if self.short is not None:
            few = self.short.tokens
            merge(sums[:few], lse[:, :few], *self.short.attend(pool, query[:few], scale))
        for window in self.windows:
            keys = self._read(pool, self.numbers.past[window.pages], scratch)
            seen, lengths = slice(window.first, window.end), (window.queries, window.keys)
            part = attention(query[seen], *keys, *lengths, scale, False)
            merge(sums[seen], lse[:, seen], *part)
            del part  # Two of them would be alive where there are several windows.
        return sums.to(query.dtype)

    def _read(self, pool: Tensor, pages: Tensor, scratch: Tensor) -> tuple[Tensor, Tensor]:
        key, value = scratch[:, : len(pages) * self.layout.tokens].unbind()
        if has_kernels(pool.device):
            group_unpack(self.layout.form, self.layout.records(pool), pages, key, value)
        else:
            for target, x in zip((key, value), read_pages(self.layout, pool, pages), strict=True):
                target.copy_(x)
        return key, value


@dataclass
class RaggedChunks:
    """New tokens of the requests of a step in one layer, as `pages.Chunk` has one request's.

    states: of all tokens of the batch. scratch: of `prepared.scratch_of`.
    """

    step: RaggedStep
    pool: Tensor
    states: tuple[Tensor, Tensor, Tensor]
    scratch: Tensor
    attention: Attention

    def __post_init__(self) -> None:
        self.first, self.end = self.step.first, self.step.end
        self.query, *self.new = (x[self.first : self.end] for x in self.states)

    def open(self) -> None:
        """Read the tokens after the last whole pages: those of rings, then the new ones."""
        self.opened = self.step.open(self.pool, *self.new)

    def keep(self) -> None:
        """Pack the pages that are full now, and put the rest into rings."""
        self.step.keep(self.pool, self.opened)

    def attend(self, scale: float) -> Tensor:
        """Attention of the new tokens over all, [T, Hq, D]."""
        given = (self.query, self.opened, self.scratch, scale, self.attention)
        return self.step.attend(self.pool, *given)
