"""Short chunks by the decode kernels: some tokens of a request are q heads of one sequence.

Their past is packed and precedes all of them, so tokens of a request see equal keys there. Windows
would dequantize the whole past for a few rows of queries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from duotone.attention.cuda.groups.decode import records_task
from duotone.attention.cuda.groups.records import GroupRecords
from duotone.attention.cuda.shared.launch import run
from duotone.attention.cuda.shared.runtime import has_kernels
from duotone.attention.cuda.shared.work import MAX_GROUP
from duotone.serve.pages import PageLayout, read_pages
from duotone.serve.windows import Lengths, attention, on_device

# Rows of queries, tokens times q heads of a kv head, up to which a chunk is short. The kernel reads
# the past once for each `MAX_GROUP` of them; a window writes and reads it in 16 bit.
MOST_ROWS = 128


def short_rows(new: Sequence[int], group: int) -> int:
    """Number of the first requests that are short. new: tokens of each."""
    if group > MAX_GROUP:
        return 0
    long = (i for i, count in enumerate(new) if count * group > MOST_ROWS)
    return next(long, len(new))


class ShortChunks:
    """Attention of the first requests of a step over their past pages.

    new, past: tokens and past pages of each. rows: of table, [rows, width], which has the pages.
    group: q heads of a kv head.
    """

    def __init__(
        self,
        layout: PageLayout,
        group: int,
        new: Sequence[int],
        past: Sequence[int],
        rows: Sequence[int],
        table: Tensor,
    ) -> None:
        self.layout, self.group, device = layout, group, table.device
        self.each = max(1, MAX_GROUP // group)
        index, places, requests, first = [], [], [], 0
        for request, count in enumerate(new):
            sequences = -(-count // self.each)
            places += range(len(index), len(index) + count)
            index += [first + min(i, count - 1) for i in range(sequences * self.each)]
            requests += [request] * sequences
            first += count
        self.tokens = first
        lengths = [past[request] * layout.tokens for request in requests]
        owners = [rows[request] for request in requests]
        lists = (index, places, owners, lengths)
        numbers, *_ = on_device([x for part in lists for x in part], [], device)
        parts = numbers.long().split([len(part) for part in lists])
        self.index, self.places, owner, self.lengths = parts
        self.pages = table[owner].int().contiguous()

    def attend(self, pool: Tensor, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention over past pages: (output [T, Hq, D], lse [Hq, T]), in fp32.

        query: [T, Hq, D], of these requests. Without a key lse is -inf.
        """
        heads, each = query.shape[1] // self.group, self.each
        split = query[self.index].unflatten(0, (-1, each)).unflatten(2, (heads, self.group))
        asked = split.transpose(1, 2).flatten(1, 3).unsqueeze(2).contiguous()
        call = self._by_kernel if has_kernels(pool.device) else self._by_torch
        parts = (x.unflatten(1, (heads, each, self.group)) for x in call(pool, asked, scale))
        out, lse = (x.transpose(1, 2).flatten(0, 1).flatten(1, 2)[self.places] for x in parts)
        return out, lse.T.contiguous()

    def _by_kernel(self, pool: Tensor, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        records = GroupRecords(self.layout.form, self.layout.records(pool)[:, :, None])
        out = torch.empty_like(query, dtype=torch.float32)
        lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        run([records_task(query, records, self.lengths, self.pages)], scale, out, lse)
        return out[:, :, 0], lse * math.log(2)

    def _by_torch(self, pool: Tensor, query: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Reference of `_by_kernel`."""
        outs = []
        for n, length in enumerate(self.lengths.tolist()):
            pages = self.pages[n, : length // self.layout.tokens]
            both = (Lengths(torch.tensor([0, x], dtype=torch.int32), x) for x in (1, length))
            given = (*read_pages(self.layout, pool, pages), *both, scale, False)
            outs.append(attention(query[n].transpose(0, 1).float(), *given))
        return torch.cat([out for out, _ in outs]), torch.stack([lse[:, 0] for _, lse in outs])
