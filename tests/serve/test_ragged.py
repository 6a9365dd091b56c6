"""Chunks of many requests together, by plain torch: each as if it came alone."""

import pytest
import torch
from ragged_cases import BY_LENGTH, REQUESTS, Batch

from duotone.serve import windows
from duotone.serve.pages import PageLayout
from duotone.serve.prepared import prepare, scratch_of
from duotone.serve.ragged import refusal
from duotone.serve.short import short_rows
from duotone.serve.windows import attention, cut

FP16 = torch.float16


@pytest.mark.parametrize("window", [64, 128, 8192])
@pytest.mark.parametrize("requests", [tuple(REQUESTS), BY_LENGTH, BY_LENGTH[:4]])
@pytest.mark.parametrize("layout", [PageLayout(2, 64, FP16), PageLayout(4, 128, FP16)], ids=str)
def test_a_batch_equals_each_row_alone(layout, requests, window, monkeypatch) -> None:
    monkeypatch.setattr(windows, "WINDOW", window)
    batch = Batch(layout, requests=requests)
    (pool, out), (want_pool, want) = batch.together(attention), batch.alone()
    assert torch.equal(pool, want_pool)
    torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)
    assert not torch.equal(pool, batch.pool)


def test_rows_without_slots_and_the_page_of_nobody_are_left_alone() -> None:
    batch = Batch(PageLayout(2, 128, FP16), dummy=(1, 5))
    (pool, _), (want_pool, _) = batch.together(attention), batch.alone()
    assert torch.equal(pool, want_pool)
    assert torch.equal(pool[0], batch.pool[0])
    for request in batch.dummy:
        used = torch.cat([batch.table[request], batch.blocks[request]]).long()
        assert torch.equal(pool[used], batch.pool[used])


def test_first_chunks_read_no_ring() -> None:
    batch = Batch(PageLayout(4, 64, FP16), requests=((0, 40), (64, 33)))
    (pool, out), (want_pool, want) = batch.together(attention), batch.alone()
    assert torch.equal(pool, want_pool)
    torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)


def test_pages_that_another_row_packs_in_this_step_are_read() -> None:
    """The second request has a hit on the page that the first one fills."""
    batch = Batch(PageLayout(2, 128, FP16), requests=((16, 16), (32, 3)))
    batch.table[1, 0] = batch.table[0, 0]
    pool, out = batch.together(attention)
    batch.pool = pool
    batch.requests = ((32, 3),)
    batch.table, batch.blocks = batch.table[1:], batch.blocks[1:]
    batch.states = tuple(x[16:] for x in batch.states)
    torch.testing.assert_close(out[16:], batch.alone()[1], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("gqa", [1, 6, 7, 8])
def test_tokens_of_short_chunks_are_heads_of_one_sequence(gqa: int) -> None:
    batch = Batch(PageLayout(2, 64, FP16), gqa, requests=((200, 5), (64, 16), (0, 1), (130, 9)))
    assert short_rows([new for _, new in batch.requests], gqa) == 4
    (_, out), (_, want) = batch.together(attention), batch.alone()
    torch.testing.assert_close(out, want, rtol=2e-3, atol=2e-3)


def test_chunks_are_short_by_their_rows_of_queries() -> None:
    assert short_rows([1, 32, 33, 2], 4) == 2
    assert short_rows([1], 17) == 0


def test_windows_hold_pages_of_requests_in_order() -> None:
    assert cut([3, 0, 2, 6], 4) == [[(0, 3), (2, 1)], [(2, 1), (3, 3)], [(3, 3)]]
    assert cut([0, 0], 4) == []


def test_steps_of_empty_pages_run() -> None:
    layout = PageLayout(2, 64, FP16)
    scratch = scratch_of(layout, 2, torch.device("cpu"))
    assert scratch.shape == (2, 8192, 2, 64)
    prepare(layout, 2, 4, 9, scratch)
    assert not scratch[:, : layout.tokens].any()


def test_what_is_done_one_by_one_is_named() -> None:
    assert refusal(PageLayout(2, 128, FP16)) is None
    assert "16 bit" in refusal(PageLayout(2, 128, torch.float32))
