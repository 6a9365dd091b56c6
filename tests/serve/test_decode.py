"""Numbers of a decode step: tokens go where a chunk of one token would put them."""

import pytest
import torch
from torch import Tensor

from duotone.serve.decode import DecodeStep, Steps
from duotone.serve.pages import PageLayout, append_tokens, read_pages, read_ring

HEADS, PAGES = 2, 40
LAYOUTS = [PageLayout(bits, d, torch.float16) for bits in (2, 4) for d in (64, 128, 256)]
CPU = torch.device("cpu")


def tables(layout: PageLayout, requests: int) -> tuple[Tensor, Tensor]:
    """(pages, ring blocks) of requests, all others', in no order; page 0 is nobody's."""
    drawn = torch.randperm(PAGES * requests, generator=torch.Generator().manual_seed(0)) + 1
    every = drawn.int().view(requests, -1)
    return every[:, layout.rings :].contiguous(), every[:, : layout.rings].contiguous()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_tokens_are_found_where_steps_have_put_them(layout: PageLayout) -> None:
    """Decode from no token to two pages: the ring ends with the new tokens, pages are packed."""
    requests = 2
    pages, blocks = tables(layout, requests)
    shape = (PAGES * requests + 1, HEADS, layout.tokens, layout.token_bytes)
    pool, step = torch.zeros(shape, dtype=torch.uint8), DecodeStep(layout, 5, CPU)
    slots = torch.zeros(requests, dtype=torch.long)
    for length in range(1, 2 * layout.tokens + 2):
        lengths = torch.tensor([length, max(length - 3, 1)], dtype=torch.int32)
        step.fill(lengths, pages, [blocks], slots)
        numbers = step.numbers
        whole = (lengths.long() - 1) // layout.tokens
        assert numbers.packed[:requests].tolist() == (whole * layout.tokens).tolist()
        assert (numbers.packed + numbers.dense)[:requests].tolist() == lengths.tolist()
        new = lengths.half()[:, None, None].expand(requests, HEADS, layout.head_dim)
        where = (numbers.rings[:requests], numbers.full[:requests], numbers.position[:requests])
        append_tokens(new, -new, pool, *where, layout)
        for request in range(requests):
            first, end = int(numbers.packed[request]), int(lengths[request])
            key, value = read_ring(layout, pool, blocks[request], first, end)
            assert torch.equal(key[:, 0, 0], torch.arange(first + 1, end + 1).half())
            assert torch.equal(value, -key)
        full = lengths % layout.tokens == 0
        page = pages.gather(1, whole[:, None])[:, 0]
        assert torch.equal(numbers.full[:requests], torch.where(full, page, 0))
    key, _ = read_pages(layout, pool, pages[0, :2])
    wanted = torch.arange(1, 2 * layout.tokens + 1)[:, None, None].expand_as(key)
    assert (key.float() - wanted).abs().max() <= 32 / (2**layout.bits - 1)


def test_rows_that_are_not_kept_write_nothing() -> None:
    layout = LAYOUTS[1]
    pages, blocks = tables(layout, 3)
    step = DecodeStep(layout, 3, CPU)
    # One that is kept, one without a slot at the end of a page, one that fills up the batch.
    lengths = torch.tensor([layout.tokens, layout.tokens, 0], dtype=torch.int32)
    step.fill(lengths, pages, [blocks], torch.tensor([7, -1, -1]))
    numbers = step.numbers
    assert numbers.full.tolist() == [int(pages[0, 0]), 0, 0]
    assert numbers.position.tolist() == [layout.tokens - 1, -1, -1]
    assert numbers.rings[1:].count_nonzero() == 0
    pool = torch.zeros(PAGES * 3 + 1, HEADS, layout.tokens, layout.token_bytes, dtype=torch.uint8)
    new = torch.ones(3, HEADS, layout.head_dim).half()
    append_tokens(new, new, pool, numbers.rings, numbers.full, numbers.position, layout)
    assert {*pool.flatten(1).any(1).nonzero()[:, 0].tolist()} <= {
        *numbers.rings[0].tolist(),
        *numbers.full.tolist(),
    }


def test_a_step_is_worked_out_once_all_groups_have_brought_their_part() -> None:
    layout = LAYOUTS[0]
    pages, blocks = tables(layout, 1)
    lengths, slots = torch.tensor([5], dtype=torch.int32), torch.tensor([0])
    steps = Steps(layout, 2, CPU)
    for ring in range(layout.rings):
        steps.bring(ring, blocks[:, ring : ring + 1])
        assert int(steps.decode.numbers.dense[0]) == 0
    steps.bring("pages", (lengths, pages, slots))
    assert int(steps.decode.numbers.dense[0]) == 5


def test_pages_that_kernels_refuse_are_refused_at_start() -> None:
    with pytest.raises(ValueError, match=r"rows of .*got torch.float32.*--dtype bfloat16"):
        Steps(PageLayout(2, 64, torch.float32), 2, CPU)
