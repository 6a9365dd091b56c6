"""Tokens of a span by how far they stand out, against a loop."""

from itertools import pairwise

import pytest
import torch

from duotone.cache.blocks import BlockTable, single_block
from duotone.cache.ragged import select
from duotone.cache.saliency import Spans, foreground_first, saliency_order

TABLES = {
    "one-span": [[0, 11], [0, 11]],
    "two-spans": [[0, 4, 11], [0, 10, 11]],
    "ragged": [[0, 4, 11], [0, 3, 3]],
    "one-token": [[0, 1], [0, 1]],
    "empty-row": [[0, 6], [0, 0]],
}


def by_loop(x: torch.Tensor, offsets: list[list[int]]) -> torch.Tensor:
    order = torch.arange(x.shape[2]).expand(x.shape[:3]).clone()
    for b, edges in enumerate(offsets):
        for head in range(x.shape[1]):
            for start, stop in pairwise(edges):
                span = x[b, head, start:stop]
                far = (span - span.mean(0)).square().sum(-1)
                order[b, head, start:stop] = start + far.argsort(descending=True, stable=True)
    return order


@pytest.mark.parametrize("name", TABLES)
def test_falls_within_every_span(name: str) -> None:
    torch.manual_seed(0)
    table = BlockTable(torch.tensor(TABLES[name]))
    x = torch.randn(2, 3, 13, 8, dtype=torch.float64)
    assert torch.equal(saliency_order(x, table), by_loop(x, TABLES[name]))


def test_padding_may_hold_anything() -> None:
    table = BlockTable(torch.tensor(TABLES["ragged"]))
    x = torch.randn(2, 3, 13, 8)
    poisoned = x.clone()
    poisoned[1, :, 3:] = float("nan")
    assert torch.equal(saliency_order(poisoned, table)[1], saliency_order(x, table)[1])


def test_equal_tokens_keep_their_order() -> None:
    order = saliency_order(torch.ones(1, 1, 6, 4), single_block(torch.tensor([6])))
    assert order.tolist() == [[list(range(6))]]


def test_tokens_move_within_their_span_k_and_v_alike() -> None:
    torch.manual_seed(0)
    visual = torch.tensor([[0, 1, 1, 1, 0, 1, 1], [0, 0, 0, 1, 1, 1, 0]], dtype=torch.bool)
    key = torch.randn(2, 2, 7, 4)
    take = select(visual)
    spans = Spans(take, BlockTable(torch.tensor([[0, 3, 5], [0, 3, 3]])))
    ours, value = foreground_first(key, 10 * key, spans, None)
    assert torch.equal(value, 10 * ours)
    assert torch.equal(ours[0, :, [0, 4]], key[0, :, [0, 4]])
    assert torch.equal(ours[1, :, [0, 1, 2, 6]], key[1, :, [0, 1, 2, 6]])
    for head in range(2):
        span = key[0, head, 1:4]
        far = (span - span.mean(0)).square().sum(-1).argsort(descending=True)
        assert torch.equal(ours[0, head, 1:4], span[far])


def test_a_basis_decides_what_stands_out() -> None:
    key = torch.tensor([[3.0, 0], [-1, 0], [-1, 0], [-1, 2], [0, -2]])[None, None]
    spans = Spans(select(torch.ones(1, 5, dtype=torch.bool)), single_block(torch.tensor([5])))
    plain, _ = foreground_first(key, key, spans, None)
    turned, _ = foreground_first(key, key, spans, "hadamard")
    assert plain[0, 0, 0].tolist() == [3, 0]
    torch.testing.assert_close(turned, plain)  # An orthogonal basis keeps distances.
