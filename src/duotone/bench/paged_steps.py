"""Time of a served decode step in one layer: append new tokens to pages and pack, attend, and both.

Requests stand at all places of their open pages, as those of a server do; in rows "all pack" each
completes its page. Every row is first compared with plain torch: pages byte for byte, and outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from duotone.bench.shapes import Shape
from duotone.bench.timing import METHODS, Clock, Deadline, measure, rotated_count
from duotone.serve.decode import DecodeStep
from duotone.serve.pages import ETAS, Chunk, PageLayout, append_tokens, write_pages

SHAPES = (Shape(32, 32, 8, 4096), Shape(32, 32, 8, 16384), Shape(1, 32, 8, 4096))
CHECKED = Shape(5, 8, 2, 128)
# Largest error of an output, as a part of the largest output.
TOLERANCE = 2e-2
# Packed pages that are drawn; the others are copies of them.
DRAWN_PAGES = 64


class PagedStep:
    """A step of requests that all have `shape.tokens` in packed pages before it, and a layer.

    all_pack: each request completes a page.
    """

    def __init__(
        self, layout: PageLayout, shape: Shape, device: torch.device, all_pack: bool = False
    ) -> None:
        self.layout, self.shape, batch, page = layout, shape, shape.batch, layout.tokens
        width = layout.rings + shape.tokens // page + 1
        # Equal for all steps of a shape, which share pools.
        order = torch.randperm(batch * width, generator=torch.Generator().manual_seed(0)) + 1
        numbers = order.to(device, torch.int32).view(batch, width)
        self.rings = numbers[:, : layout.rings].contiguous()
        self.pages = numbers[:, layout.rings :].contiguous()
        places = torch.arange(batch, device=device) * page // batch
        places = torch.full_like(places, page - 1) if all_pack else places
        self.lengths = (shape.tokens + places + 1).int()
        self.step = DecodeStep(layout, batch, device)
        slots = torch.zeros(batch, dtype=torch.long, device=device)
        self.step.fill(self.lengths, self.pages, [self.rings], slots)
        heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
        size = (batch, sum(heads), shape.head_dim)
        # As models have them: slices of one product.
        product = torch.randn(size, device=device).to(layout.dtype)
        self.query, self.key, self.value = product.split(heads, 1)
        self.out = torch.empty_like(self.query, memory_format=torch.contiguous_format)

    def pool(self) -> Tensor:
        """Pages of a layer, those of rings with zeros."""
        layout, heads, device = self.layout, self.shape.kv_heads, self.rings.device
        size = (DRAWN_PAGES, heads, layout.tokens, layout.token_bytes)
        drawn = torch.zeros(size, dtype=torch.uint8, device=device)
        states = torch.randn(2, DRAWN_PAGES * layout.tokens, heads, layout.head_dim, device=device)
        pages = torch.arange(DRAWN_PAGES, device=device)
        write_pages(layout, drawn, pages, *states.to(layout.dtype))
        count = self.rings.numel() + self.pages.numel() + 1
        pool = drawn[torch.randint(DRAWN_PAGES, (count,), device=device)]
        pool[self.rings.long()] = 0
        return pool

    def append(self, pool: Tensor) -> Tensor:
        """Keep the new tokens; pack full pages. Returns the pool."""
        self.step.store(pool, self.key, self.value)
        return pool

    def attend(self, pool: Tensor) -> Tensor:
        """Attention of the new tokens, [batch, q_heads, head_dim]. pool: with them."""
        scale = self.shape.head_dim**-0.5
        self.step.attend(pool, self.pages, self.query, scale, self.out)
        return self.out

    def both(self, pool: Tensor) -> Tensor:
        """Append, then attend."""
        return self.attend(self.append(pool))

    def expected(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        """The pool after the step, and attention, by plain torch, request by request."""
        after, numbers, outs = pool.clone(), self.step.numbers, []
        where = (numbers.rings, numbers.full, numbers.position)
        append_tokens(self.key, self.value, after, *where, self.layout)
        for n, length in enumerate(self.lengths.tolist()):
            own = tuple(x[n : n + 1] for x in (self.query, self.key, self.value))
            chunk = Chunk(self.layout, pool, self.pages[n], self.rings[n], own, length - 1)
            chunk.open()
            outs.append(chunk.attend(self.shape.head_dim**-0.5))
        return after, torch.cat(outs)

    @property
    def append_bytes(self) -> int:
        """Bytes of new rows, and of pages that become full: read as rows, written packed."""
        layout, packs = self.layout, int(self.step.numbers.full.count_nonzero())
        row_bytes = 2 * layout.head_dim * layout.dtype.itemsize
        page_bytes = layout.tokens * row_bytes + layout.nbytes
        return self.shape.kv_heads * (self.shape.batch * row_bytes + packs * page_bytes)

    @property
    def attend_bytes(self) -> int:
        """Bytes of packed pages, and of rows of open ones."""
        layout, numbers = self.layout, self.step.numbers
        row_bytes = 2 * layout.head_dim * layout.dtype.itemsize
        packed = int(numbers.packed.sum()) * layout.token_bytes
        return self.shape.kv_heads * (packed + int(numbers.dense.sum()) * row_bytes)


def step_rows(
    clock: Clock,
    deadline: Deadline,
    repeats: int,
    progress: Callable[[str, int, int], None],
    shapes: Sequence[Shape] = SHAPES,
) -> dict[str, Any]:
    """{"rows": ..., "stopped": reason for missing shapes, or None}.

    Errors: ValueError where a kernel differs from torch.
    """
    for bits in ETAS:
        check(_layout(bits, CHECKED), clock.device)
    rows: list[dict[str, Any]] = []
    stopped = None
    for done, shape in enumerate(shapes):
        progress(f"steps on pages, {shape}", done, len(shapes))
        if deadline.passed:
            stopped = f"the time was over before {shape} (--minutes)"
            break
        for bits in ETAS:
            clock.release()
            rows += _shape_rows(clock, shape, bits, repeats)
    return {"status": "ok", "rows": rows, "stopped": stopped}


def check(layout: PageLayout, device: torch.device) -> None:
    """Raise ValueError if pages or outputs are not those of plain torch."""
    for all_pack in (False, True):
        step = PagedStep(layout, CHECKED, device, all_pack)
        pool = step.pool()
        after, out = step.expected(pool)
        different = float((step.append(pool) != after).float().mean())
        error = float((step.attend(pool) - out).abs().max() / out.abs().max())
        if different or not error <= TOLERANCE:
            raise ValueError(
                f"a step on pages of {layout.bits} bits must do what torch does; {different:.2%} "
                f"of the bytes differ, outputs by {error:.1e}: do not trust its times"
            )


def _layout(bits: int, shape: Shape) -> PageLayout:
    return PageLayout(bits, shape.head_dim, torch.bfloat16)


def _shape_rows(clock: Clock, shape: Shape, bits: int, repeats: int) -> list[dict[str, Any]]:
    layout = _layout(bits, shape)
    spread, full = (PagedStep(layout, shape, clock.device, all_pack) for all_pack in (False, True))
    first = spread.pool()
    pools = [first]
    pools += [first.clone() for _ in range(rotated_count(first.nbytes, clock.free_bytes()) - 1)]
    timed = {
        "append": (spread.append, spread.append_bytes),
        "append, all pack": (full.append, full.append_bytes),
        "attend": (spread.attend, spread.attend_bytes),
        "step": (spread.both, spread.append_bytes + spread.attend_bytes),
        "step, all pack": (full.both, full.append_bytes + full.attend_bytes),
    }
    rows = []
    for name, (call, nbytes) in timed.items():
        calls = [lambda pool=pool, call=call: call(pool) for pool in pools]
        for one in calls:
            one()
        us = measure(calls, clock, repeats)
        tb_per_s = {method: us[method] and nbytes / us[method] / 1e6 for method in METHODS}
        row = {"shape": asdict(shape), "row": f"{bits} bit, {name}", "bytes": nbytes}
        rows.append(row | {"us": us, "tb_per_s": tb_per_s})
    return rows
