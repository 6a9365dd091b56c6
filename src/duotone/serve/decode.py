"""A decode step on pages by kernels: one new token of each request, nothing asks the host.

The plain-torch reference is `pages.Chunk`, request by request. Numbers that all layers
share are worked out once per step into tensors that stay, so that a graph of the layers finds them.
A layer is two launches: one appends and packs, one attends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from duotone.attention.cuda.groups.append import group_append, refuse
from duotone.attention.cuda.groups.decode import records_task
from duotone.attention.cuda.groups.records import GroupRecords
from duotone.attention.cuda.groups.step_numbers import (
    StepNumbers,
    numbers_by_torch,
    step_numbers,
)
from duotone.attention.cuda.groups.tail import Tail
from duotone.attention.cuda.shared.launch import run
from duotone.attention.cuda.shared.runtime import has_kernels
from duotone.attention.refused import reason_against
from duotone.serve.pages import PageLayout


class DecodeStep:
    """Numbers of a step of up to `most` requests, and its launches in each layer.

    Errors: ValueError for pages that kernels refuse.
    """

    def __init__(self, layout: PageLayout, most: int, device: torch.device) -> None:
        if reason := reason_against(refuse, layout.form, layout.spec, layout.dtype):
            raise ValueError(
                f"a GPU serves pages by kernels: {reason}. Serve in 16 bit: --dtype bfloat16."
            )
        self.layout, self.most, self.is_filled = layout, most, False
        self.numbers = StepNumbers.zeros(most, layout.rings, device)

    def fill(self, lengths: Tensor, pages: Tensor, rings: Sequence[Tensor], slots: Tensor) -> None:
        """Work the numbers out, as `step_numbers` does.

        Errors: ValueError for more requests than there is room for.
        """
        if len(lengths) > self.most:
            raise ValueError(
                f"a decode step has at most {self.most} requests, as --max-num-seqs says; got "
                f"{len(lengths)}. Raise it."
            )
        call = step_numbers if has_kernels(lengths.device) else numbers_by_torch
        call(lengths, pages, rings, slots, self.layout.tokens, self.numbers)
        self.is_filled = True

    def store(self, pool: Tensor, key: Tensor, value: Tensor) -> None:
        """Keep the new tokens of one layer, and pack the pages that become full.

        pool: as in `PageLayout.records`. key, value: [n, H, D]. Errors: RuntimeError for numbers of
        an earlier step.
        """
        if not self.is_filled:
            raise RuntimeError(
                "a decode step needs the block tables of all its rings; got some of them. vLLM "
                "has put the rings of these layers into groups of others."
            )
        layout, count, step = self.layout, len(key), self.numbers
        where = (step.rings[:count], step.full[:count], step.position[:count])
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
        step = self.numbers
        tail = Tail(step.rings[:count], step.dense[:count], self.layout.dtype)
        task = records_task(asked, records, step.packed[:count], pages, tail)
        run([task], scale, out.unsqueeze(2))


class Steps:
    """A decode step of all layers with one layout; the builders of its groups bring their parts.

    An engine has a builder per cache group, and calls them one by one in an order of its own.
    """

    def __init__(self, layout: PageLayout, most: int, device: torch.device) -> None:
        self.decode = DecodeStep(layout, most, device)
        self._parts: dict[int | str, Any] = {}

    def bring(self, part: int | str, given: Any) -> None:
        """Take the block table of a ring (by number), or ("pages") lengths, pages, slots.

        A ring of larger blocks has several pages, so that fewer rings come.
        """
        self._parts[part] = given
        if part == "pages":
            self.decode.is_filled = False
        rings, tables = self.decode.layout.rings, [self._parts[n] for n in sorted(self._rings)]
        if "pages" not in self._parts or sum(table.shape[1] for table in tables) < rings:
            return
        lengths, pages, slots = self._parts["pages"]
        if len(lengths):
            self.decode.fill(lengths, pages, tables, slots)
        self._parts.clear()

    @property
    def _rings(self) -> set[int]:
        return {part for part in self._parts if isinstance(part, int)}
