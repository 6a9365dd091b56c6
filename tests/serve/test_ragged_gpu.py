"""Chunks of many requests by kernels against each alone by plain torch, on a real GPU."""

import pytest
import torch
from cuda_device import NEEDS_KERNELS
from ragged_cases import BY_LENGTH, HEADS, REQUESTS, Batch

from duotone.attention.cuda.groups.chunk_numbers import (
    ChunkNumbers,
    chunk_numbers,
    numbers_by_torch,
)
from duotone.serve import pages as reference
from duotone.serve import ragged, windows
from duotone.serve.pages import PageLayout
from duotone.serve.prepared import prepare, scratch_of
from duotone.serve.ragged import RaggedStep
from duotone.serve.windows import attention

pytestmark = NEEDS_KERNELS
BF16 = torch.bfloat16


@pytest.mark.parametrize("requests", [tuple(REQUESTS), BY_LENGTH], ids=["mixed", "by length"])
@pytest.mark.parametrize("gqa", [1, 4, 6, 7, 8])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_batch_equals_each_row_alone(
    bits: int, head_dim: int, gqa: int, requests: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "has_kernels", lambda device: False)
    monkeypatch.setattr(windows, "WINDOW", 128)
    batch = Batch(PageLayout(bits, head_dim, BF16), gqa, "cuda", requests, dummy=(1, 5))
    (pool, out), (want_pool, want) = batch.together(attention), batch.alone()
    assert torch.equal(pool, want_pool)
    torch.testing.assert_close(out, want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("bits", [2, 4])
def test_pages_of_a_long_past_are_read_in_scratch_that_does_not_grow(bits: int) -> None:
    layout, device, new = PageLayout(bits, 128, BF16), torch.device("cuda"), 256
    width = 65536 // layout.tokens + 9
    pool = torch.zeros(
        width + 9, HEADS, layout.tokens, layout.token_bytes, dtype=torch.uint8, device=device
    )
    table = torch.arange(9, width + 9, dtype=torch.int32, device=device)[None]
    blocks = torch.arange(1, layout.rings + 1, dtype=torch.int32, device=device)[None]
    query, key, value = (torch.randn(new, n, 128, device=device).bfloat16() for n in (8, 2, 2))
    scratch, peaks = scratch_of(layout, HEADS, device), []
    prepare(layout, HEADS, 4, width, scratch)

    def by_flash(query, keys, values, queries, tokens, scale, causal):
        """Sums of the right shapes alone: scratch of ours is measured."""
        return torch.zeros_like(query), query.new_zeros(query.shape[1::-1], dtype=torch.float32)

    slots = torch.zeros(new, dtype=torch.long, device=device)
    for before in (8192, 65536):
        step = RaggedStep(layout, HEADS, 4, [(0, 0, new, before)], table, blocks, slots)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        opened = step.open(pool, key, value)
        step.keep(pool, opened)
        step.attend(pool, query, opened, scratch, 1.0, by_flash)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - held)
        del opened
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize("requests", [tuple(REQUESTS), BY_LENGTH], ids=["mixed", "by length"])
def test_numbers_of_chunks_are_those_of_torch(
    requests: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def both(*given: object) -> ChunkNumbers:
        found.extend(call(*given) for call in (chunk_numbers, numbers_by_torch))
        return found[0]

    monkeypatch.setattr(ragged, "chunk_numbers", both)
    Batch(PageLayout(2, 64, BF16), 4, "cuda", requests, dummy=(1, 5)).together(attention)
    ours, theirs = map(vars, found)
    assert all(torch.equal(ours[name], x) for name, x in theirs.items())
    assert theirs["pages"].any()
