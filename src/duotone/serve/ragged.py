"""Chunks of many requests by kernels: opened, packed and attended together; nothing asks the host.

The plain-torch reference is `pages.Chunk`, request by request. Numbers that all layers share are
worked out once per step. Without kernels all is done by plain torch, for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from duotone.attention.cuda.dense.ring_rows import (
    keep_rows,
    kept_by_torch,
    open_rows,
    opened_by_torch,
)
from duotone.attention.cuda.groups.pack import page_pack
from duotone.attention.cuda.groups.unpack import check, group_unpack
from duotone.attention.cuda.shared.merge_into import merge_into, merged_by_torch
from duotone.attention.cuda.shared.runtime import has_kernels
from duotone.attention.refused import reason_against
from duotone.serve.pages import PageLayout, read_pages, write_pages
from duotone.serve.short import ShortChunks, short_rows
from duotone.serve.windows import Attention, lengths_of, on_device, windows_of

# Rows of a step: (row, first token, end, tokens before).
Row = tuple[int, int, int, int]


def refusal(layout: PageLayout) -> str | None:
    """Reason why chunks of a layer are done one by one, or None."""
    if layout.dtype not in (torch.float16, torch.bfloat16):
        return f"chunks are served together in 16 bit; got {layout.dtype}"
    return reason_against(check, layout.form)


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
        self.layout, self.kv_heads, tokens = layout, kv_heads, layout.tokens
        self.first, self.end, device = rows[0][1], rows[-1][2], table.device
        past = [before // tokens for *_, before in rows]
        tails = [before % tokens for *_, before in rows]
        new = [end - first for _, first, end, _ in rows]
        opened = [tail + count for tail, count in zip(tails, new, strict=True)]
        full = [count // tokens for count in opened]
        rest = [count % tokens for count in opened]
        starts = [0, *accumulate(opened)][:-1]
        numbers = [[row for row, *_ in rows], [first for _, first, *_ in rows], starts]
        numbers += [past, tails, opened, full, rest]
        row, first, start, *counts = on_device(torch.tensor(numbers), device)
        whole, tail, *_ = counts
        self.queries, self.keys = lengths_of([new, opened], device)
        short = short_rows(new, group)
        self.short = None
        if any(past[:short]):
            numbers = (new[:short], past[:short], table[row[:short]])
            self.short = ShortChunks(layout, group, *numbers)
        far = [0] * short + past[short:]
        self.windows = windows_of(far, new, tokens, device)
        kept, blocks = slots[first] >= 0, blocks[row].long()

        owner, within = _spread(counts[2], sum(opened))
        ring = self._ring_rows(blocks[owner], whole[owner] * tokens + within)
        fresh = first[owner] - self.first + within - tail[owner]
        self.opened = torch.where(within < tail[owner], ~ring, fresh) if any(tails) else None

        owner, within = _spread(counts[4], sum(rest))
        after = counts[3][owner] * tokens + within
        self.rest = start[owner] + after
        ring = self._ring_rows(blocks[owner], whole[owner] * tokens + after)
        self.rest_at = torch.where(kept[owner], ~ring, 0)

        owner, within = _spread(counts[3], sum(full))
        page = table[row[owner], whole[owner] + within]
        self.pages = torch.where(kept[owner], page, 0).int()
        index = (start[owner] + within * tokens)[:, None] + torch.arange(tokens, device=device)
        self.full = index.flatten()[None]

        owner, within = _spread(whole[short:], sum(far))
        self.past = table[row[short:][owner], within].int()

    def _ring_rows(self, blocks: Tensor, positions: Tensor) -> Tensor:
        """Rows of K of kv head 0."""
        return self.layout.ring_slots(blocks, positions[:, None], self.kv_heads)[0, :, 0, 0]

    def open(self, pool: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of open pages, then of new tokens, request after request, [n, H, D].

        key, value: [T, H, D], of the new tokens.
        """
        if self.opened is None:
            return key, value
        call = open_rows if has_kernels(pool.device) else opened_by_torch
        rows = self.layout.rows(pool)
        return call(rows, (key, value), self.opened, self.layout.ring_rows)

    def keep(self, pool: Tensor, opened: tuple[Tensor, Tensor]) -> None:
        """Pack the pages that are full now, and put the rest into rings."""
        layout = self.layout
        rest = (self.rest, self.rest_at, layout.ring_rows)
        if has_kernels(pool.device):
            states = (x.transpose(0, 1)[None] for x in opened)
            given = (self.full, self.pages, layout.form, layout.spec, layout.records(pool))
            if len(self.pages):
                page_pack(*states, *given)
            keep_rows(layout.rows(pool), opened, *rest)
            return
        kept = self.pages > 0
        full = self.full.view(-1, layout.tokens)[kept].flatten()
        if len(full):
            write_pages(layout, pool, self.pages[kept], *(x[full] for x in opened))
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
            keys = self._read(pool, self.past[window.pages], scratch)
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


def _spread(counts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """(request, number in it) of all things that requests have `counts` of."""
    requests = torch.arange(len(counts), device=counts.device)
    owner = torch.repeat_interleave(requests, counts, output_size=total)
    begin = counts.cumsum(0) - counts
    return owner, torch.arange(total, device=counts.device) - begin[owner]
