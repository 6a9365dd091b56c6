"""The packed past of many requests in windows of pages: attention over it in fixed scratch.

A window holds `WINDOW` tokens of one request or of several in a row, dequantized. Parts of a
request's attention are merged by log-sum-exp, so that scratch does not grow with the context.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

# Tokens of a window. Twice as many take twice the scratch, and half the merging.
WINDOW = 8192


@dataclass(frozen=True)
class Lengths:
    """Lengths of sequences in a row. ends: [n + 1] int32, from 0; longest: of them."""

    ends: Tensor
    longest: int


# Attention as `attention`; FlashAttention's is in `serve.flash`.
Attention = Callable[[Tensor, Tensor, Tensor, Lengths, Lengths, float, bool], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Window:
    """Pages of some requests, and the queries that see them.

    first, end: queries. pages: a slice of all past pages of a step.
    """

    first: int
    end: int
    pages: slice
    queries: Lengths
    keys: Lengths


def cut(past: Sequence[int], most: int) -> list[list[tuple[int, int]]]:
    """Pages of requests in windows of at most `most`: lists of (request, pages), in order.

    past: pages of each request.
    """
    windows: list[list[tuple[int, int]]] = []
    room = 0
    for request, left in enumerate(past):
        while left:
            if not room:
                windows.append([])
                room = most
            taken = min(left, room)
            windows[-1].append((request, taken))
            left, room = left - taken, room - taken
    return windows


def windows_of(
    past: Sequence[int], new: Sequence[int], page_tokens: int
) -> tuple[list[tuple[int, int, slice]], list[list[int]]]:
    """Windows of a step: (first, end, pages) of each, and lengths of its queries, then its keys.

    past: pages of each request. new: its queries.
    """
    starts, windows, lengths, page = [0, *accumulate(new)], [], [], 0
    for pieces in cut(past, max(1, WINDOW // page_tokens)):
        first, last = pieces[0][0], pieces[-1][0]
        pages = dict(pieces)
        keys = [pages.get(request, 0) * page_tokens for request in range(first, last + 1)]
        count = sum(pages.values())
        windows.append((starts[first], starts[last + 1], slice(page, page + count)))
        lengths += [list(new[first : last + 1]), keys]
        page += count
    return windows, lengths


def on_device(
    numbers: Sequence[int], lengths: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, *tuple[Lengths, ...]]:
    """int32 numbers, then lengths, on the device by one copy that the host does not wait for."""
    lists = [numbers, *([0, *accumulate(x)] for x in lengths)]
    flat = torch.tensor([x for part in lists for x in part], dtype=torch.int32)
    if device.type == "cuda":
        flat = flat.pin_memory().to(device, non_blocking=True)
    first, *ends = flat.to(device).split([len(x) for x in lists])
    return first, *(Lengths(x, max(counts)) for x, counts in zip(ends, lengths, strict=True))


def attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    queries: Lengths,
    tokens: Lengths,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of sequences in a row: (output [T, Hq, D], lse [Hq, T] in fp32).

    query: [T, Hq, D]. keys, values: [n, H, D]. causal: the last query of a sequence sees all of its
    keys, and each before it one less. A query without a key has lse -inf and output 0.
    """
    each = query.shape[1] // keys.shape[1]
    out, lse = torch.zeros_like(query), query.new_zeros(query.shape[1::-1], dtype=torch.float32)
    ends = zip(*(x.ends.tolist() for x in (queries, tokens)), strict=True)
    a, c = next(ends)
    for b, d in ends:
        grouped = query[a:b].float().unflatten(1, (keys.shape[1], each))
        scores = torch.einsum("qhgd,nhd->hgqn", grouped, keys[c:d].float()) * scale
        if causal:
            seen = torch.arange(d - c - (b - a), d - c, device=query.device)[:, None]
            scores.masked_fill_(torch.arange(d - c, device=query.device) > seen, -torch.inf)
        found = scores.logsumexp(-1) if d > c else scores.new_full(scores.shape[:3], -torch.inf)
        weights = (scores - found[..., None]).exp().nan_to_num(0)
        part = torch.einsum("hgqn,nhd->qhgd", weights, values[c:d].float())
        out[a:b], lse[:, a:b] = part.flatten(1, 2).to(out.dtype), found.flatten(0, 1)
        a, c = b, d
    return out, lse
