"""Numbers of a decode step: tokens go where a chunk of one token would put them."""

import pytest
import torch
from torch import Tensor

from duotone.attention.cuda.groups.append import aligned
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


def test_a_step_of_more_requests_than_it_has_room_for_is_refused() -> None:
    layout, lengths = LAYOUTS[0], torch.ones(3, dtype=torch.int32)
    pages, blocks = tables(layout, 3)
    step = DecodeStep(layout, 2, CPU)
    with pytest.raises(ValueError, match="at most 2 requests, as --max-num-seqs says; got 3"):
        step.fill(lengths, pages, [blocks], torch.zeros(3, dtype=torch.long))


def test_a_step_whose_rings_did_not_all_come_stores_nothing() -> None:
    """Numbers of the step before would put tokens where others are."""
    layout, lengths = LAYOUTS[0], torch.ones(2, dtype=torch.int32)
    pages, blocks = tables(layout, 2)
    steps, new = Steps(layout, 2, CPU), torch.zeros(2, HEADS, layout.head_dim).half()
    given = (lengths, pages, torch.zeros(2, dtype=torch.long))
    pool = torch.zeros(PAGES, HEADS, layout.tokens, layout.token_bytes, dtype=torch.uint8)
    for ring in range(layout.rings):
        steps.bring(ring, blocks[:, ring : ring + 1])
    steps.bring("pages", given)
    assert steps.decode.is_filled
    steps.bring("pages", given)
    for ring in range(layout.rings - 1):
        steps.bring(ring, blocks[:, ring : ring + 1])
    with pytest.raises(RuntimeError, match="needs the block tables of all its rings"):
        steps.decode.store(pool, new, new)
    steps.bring(layout.rings - 1, blocks[:, -1:])
    assert steps.decode.is_filled


def test_tokens_that_vectors_cannot_read_are_copied_to_adjacent_rows() -> None:
    """A plain clone of dense numbers with other strides would keep these."""
    across = torch.arange(2 * 3 * 64).half().view(2, 64, 3).transpose(1, 2)
    shifted = torch.arange(2 * 3 * 64 + 1).half()[1:].view(2, 3, 64)
    for x in (across, shifted):
        copy = aligned(x)
        assert torch.equal(copy, x)
        assert copy.stride() == (192, 64, 1)
        assert copy.data_ptr() % 16 == 0
    product = torch.zeros(2, 4, 64).half()[:, 1:]
    assert aligned(product) is product
