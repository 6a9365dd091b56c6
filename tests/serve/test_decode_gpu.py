"""Decode steps by kernels against chunks of one token by plain torch, on a real GPU."""

import pytest
import torch
from cuda_device import NEEDS_KERNELS

from duotone.serve import pages as reference
from duotone.serve.decode import DecodeStep
from duotone.serve.pages import Chunk, PageLayout

pytestmark = NEEDS_KERNELS
HEADS, PAGES = 2, 12


@pytest.mark.parametrize("gqa", [1, 4, 6, 7])
@pytest.mark.parametrize("bits", [2, 4])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_steps_equal_chunks(
    bits: int, head_dim: int, gqa: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, device = PageLayout(bits, head_dim, torch.bfloat16), torch.device("cuda")
    torch.manual_seed(0)
    lengths = [1, layout.tokens - 1, layout.tokens, 2 * layout.tokens + 5]
    count = len(lengths)
    numbers = torch.randperm(count * PAGES, device=device).int().view(count, -1) + 1
    blocks, pages = numbers[:, : layout.rings], numbers[:, layout.rings :].contiguous()
    shape = (count * PAGES + 1, HEADS, layout.tokens, layout.token_bytes)
    pools = [torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2)]
    drawn = lambda n, heads: torch.randn(n, heads, head_dim, device=device).bfloat16()  # noqa: E731
    for request, length in enumerate(lengths):
        if length > 1:
            states = tuple(drawn(length - 1, n) for n in (gqa * HEADS, HEADS, HEADS))
            for pool in pools:
                chunk = Chunk(layout, pool, pages[request], blocks[request], states, 0)
                chunk.open()
                chunk.keep()
    states = tuple(drawn(count, n) for n in (gqa * HEADS, HEADS, HEADS))
    step = DecodeStep(layout, HEADS, count, device)
    given = torch.tensor(lengths, dtype=torch.int32, device=device)
    step.fill(given, pages, blocks, torch.zeros(count, dtype=torch.long, device=device))
    tail, out = step.store(pools[0], *states[1:]), torch.empty_like(states[0])
    step.attend(pools[0], pages, tail, states[0], head_dim**-0.5, out)
    monkeypatch.setattr(reference, "has_kernels", lambda device: False)
    for request, length in enumerate(lengths):
        own = tuple(x[request : request + 1] for x in states)
        chunk = Chunk(layout, pools[1], pages[request], blocks[request], own, length - 1)
        chunk.open()
        chunk.keep()
        want = chunk.attend(head_dim**-0.5)
        torch.testing.assert_close(out[request : request + 1], want, rtol=2e-2, atol=2e-2)
    # Rings differ: a step puts every new token there, also the last one of a page.
    used = pages.flatten().long()
    assert torch.equal(pools[0][used], pools[1][used])
