"""Memory and kernels of chunks, ready before requests come: none waits for a compilation."""

from __future__ import annotations

import torch
from torch import Tensor

from duotone.serve import windows
from duotone.serve.pages import PageLayout
from duotone.serve.ragged import RaggedStep
from duotone.serve.short import MOST_ROWS, ShortChunks, short_rows
from duotone.serve.windows import attention

# Sequences of short chunks of a step: kernels differ by how many there are.
SHORT_SEQUENCES = (1, 4, 16, 64)


def scratch_of(layout: PageLayout, kv_heads: int, device: torch.device) -> Tensor:
    """Memory of a window: K and V, [2, tokens, kv_heads, D]. All layers may share it."""
    tokens = max(1, windows.WINDOW // layout.tokens) * layout.tokens
    shape = (2, tokens, kv_heads, layout.head_dim)
    return torch.empty(shape, dtype=layout.dtype, device=device)


def prepare(layout: PageLayout, kv_heads: int, group: int, width: int, scratch: Tensor) -> None:
    """Run steps of empty pages. group: q heads of a kv head. width: of block tables."""
    device, before = scratch.device, layout.tokens + 1
    new = MOST_ROWS // group + 1 + layout.tokens
    pages = (before + new) // layout.tokens + 1
    shape = (1 + layout.rings + pages, kv_heads, layout.tokens, layout.token_bytes)
    pool = torch.zeros(shape, dtype=torch.uint8, device=device)
    numbers = torch.arange(1, shape[0], dtype=torch.int32, device=device)[None]
    blocks, table = numbers.split([layout.rings, pages], 1)
    slots = torch.zeros(new, dtype=torch.long, device=device)
    step = RaggedStep(layout, kv_heads, group, [(0, 0, new, before)], table, blocks, slots)
    states = (
        torch.zeros(new, n, layout.head_dim, dtype=layout.dtype, device=device)
        for n in (kv_heads * group, kv_heads, kv_heads)
    )
    query, key, value = states
    opened = step.open(pool, key, value)
    step.keep(pool, opened)
    step.attend(pool, query, opened, scratch, 1.0, attention)
    for count in SHORT_SEQUENCES if short_rows([1], group) else ():
        wide = table.new_zeros(count, width)
        short = ShortChunks(layout, group, [1] * count, [0] * count, range(count), wide)
        short.attend(pool, query[:1].expand(count, -1, -1), 1.0)
