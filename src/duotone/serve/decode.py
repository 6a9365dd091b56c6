"""A decode step on pages by kernels: one new token of each request, nothing asks the host.

The plain-torch reference is `pages.Chunk`, request by request. Numbers that all layers
share are worked out once per step into tensors that stay, so that a graph of the layers finds them.
A layer is two launches: one appends and packs, one attends.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from duotone.attention.cuda.groups.append import group_append, refuse
from duotone.attention.cuda.groups.decode import records_task
from duotone.attention.cuda.groups.records import GroupRecords
from duotone.attention.cuda.groups.tail import Tail
from duotone.attention.cuda.shared.launch import run
from duotone.attention.refused import reason_against
from duotone.serve.pages import PageLayout


class DecodeStep:
    """Where the tokens of a step go and what they see, for up to `most` requests.

    packed, dense: tokens in pages before the step, and after them, the new one included. position:
    of the new token; -1: it is not kept. full: the page that it completes; 0, the page of nobody,
    for none. rings: pages of the requests' rings. Errors: ValueError for pages that kernels refuse.
    """

    def __init__(self, layout: PageLayout, kv_heads: int, most: int, device: torch.device) -> None:
        if reason := reason_against(refuse, layout.form, layout.spec, layout.dtype):
            raise ValueError(
                f"a GPU serves pages by kernels: {reason}. Serve in 16 bit: --dtype bfloat16."
            )
        self.layout, self.kv_heads = layout, kv_heads
        numbers = torch.zeros(3, most, dtype=torch.long, device=device)
        self.packed, self.dense, self.position = numbers
        self.full = torch.zeros(most, dtype=torch.int32, device=device)
        self.rings = torch.zeros(most, layout.rings, dtype=torch.int32, device=device)

    def fill(self, lengths: Tensor, pages: Tensor, blocks: Tensor, slots: Tensor) -> None:
        """Work the numbers out.

        lengths: [n], tokens of each request with the new one; 0: a row that fills up the batch.
        pages: [n, width], its pages. blocks: [n, rings], those of its ring. slots: [n], below 0
        where the new token is not kept.
        """
        tokens, count = self.layout.tokens, len(lengths)
        at = lengths.long() - 1
        whole = at.clamp_min(0) // tokens
        kept = (slots[:count] >= 0) & (at >= 0)
        full = kept & (at % tokens == tokens - 1)
        page = pages.gather(1, whole[:, None])[:, 0]
        self.packed[:count] = whole * tokens
        self.dense[:count] = at + 1 - whole * tokens
        self.position[:count] = torch.where(kept, at, -1)
        self.full[:count] = torch.where(full, page, 0)
        self.rings[:count] = torch.where(kept[:, None], blocks, 0)

    def store(self, pool: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep the new tokens of one layer, and pack the pages that become full.

        pool: as in `PageLayout.records`. key, value: [n, H, D].
        """
        layout, count = self.layout, len(key)
        where = (self.rings[:count], self.full[:count], self.position[:count])
        group_append(key, value, layout.records(pool), *where, layout.form, layout.spec)

    def attend(self, pool: Tensor, pages: Tensor, query: Tensor, scale: float, out: Tensor) -> None:
        """Attention over the pages before and the open one, into `out`, [n, Hq, D].

        pages: [n, width] int32, contiguous. query: [n, Hq, D], often a slice of a product.
        """
        count, is_read = len(pages), query.stride()[1:] == (query.shape[2], 1)
        if not is_read or query.stride(0) % 4:
            query = query.contiguous()
        asked = query.unsqueeze(2)
        records = GroupRecords(self.layout.form, self.layout.records(pool)[:, :, None])
        tail = Tail(self.rings[:count], self.dense[:count], self.layout.dtype)
        task = records_task(asked, records, self.packed[:count], pages, tail)
        run([task], scale, out.unsqueeze(2))


class Steps:
    """A decode step of all layers with one layout; the builders of its groups bring their parts.

    An engine has a builder per cache group, and calls them one by one in an order of its own.
    """

    def __init__(self, layout: PageLayout, kv_heads: int, most: int, device: torch.device) -> None:
        self.decode = DecodeStep(layout, kv_heads, most, device)
        self._parts: dict[int | str, Any] = {}

    def bring(self, part: int | str, given: Any) -> None:
        """Take the block table of a ring (by number), or ("pages") lengths, pages, slots.

        A ring of larger blocks has several pages, so that fewer rings come.
        """
        self._parts[part] = given
        rings, tables = self.decode.layout.rings, [self._parts[n] for n in sorted(self._rings)]
        if "pages" not in self._parts or sum(table.shape[1] for table in tables) < rings:
            return
        lengths, pages, slots = self._parts["pages"]
        if len(lengths):
            blocks = torch.cat([table[: len(lengths)] for table in tables], 1)[:, :rings]
            self.decode.fill(lengths, pages, blocks, slots)
        self._parts.clear()

    @property
    def _rings(self) -> set[int]:
        return {part for part in self._parts if isinstance(part, int)}
