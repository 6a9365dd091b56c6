"""Sorted squares of parts of spans, against a loop."""

import math

import pytest
import torch

from duotone.cache.blocks import BlockTable
from duotone.calibrate.profiles import blocks_of, sorted_squares

SPANS = torch.tensor([[-1, 0, 0, 0, 0, 0, 4, 4, 4, -1], [7, 7, 7, 7, 7, 7, 7, -1, -1, -1]])


def test_spans_become_blocks():
    assert blocks_of(SPANS).offsets.tolist() == [[0, 5, 8], [0, 7, 7]]
    assert blocks_of(torch.full((2, 3), -1)).offsets.tolist() == [[0], [0]]


@pytest.mark.parametrize("share", [0.1, 0.45, 0.9])
def test_parts_are_cut_from_the_front(share):
    torch.manual_seed(0)
    x, blocks = torch.randn(2, 3, 8, 4, dtype=torch.float64), blocks_of(SPANS)
    made = sorted_squares(x, blocks, {"visual": share, "background": 1 - share})
    sums = {"visual": torch.zeros(3, 4), "background": torch.zeros(3, 4)}
    tokens = {"visual": 0, "background": 0}
    for b, start, stop in ((0, 0, 5), (0, 5, 8), (1, 0, 7)):
        cut = start + math.ceil(share * (stop - start))
        for part, piece in (("visual", x[b, :, start:cut]), ("background", x[b, :, cut:stop])):
            if piece.shape[1]:
                squares = piece.var(1, correction=0) * piece.shape[1]
                sums[part] = sums[part] + squares.sort(-1, descending=True).values
                tokens[part] += piece.shape[1]
    for part, (falling, count) in made.items():
        torch.testing.assert_close(falling, sums[part].to(falling))
        assert count == tokens[part]


def test_padding_enters_nothing():
    x, blocks = torch.randn(1, 1, 9, 4), BlockTable(torch.tensor([[0, 6]]))
    poisoned = x.clone()
    poisoned[:, :, 6:] = float("nan")
    ((falling, _),) = sorted_squares(poisoned, blocks, {"visual": 1.0}).values()
    torch.testing.assert_close(
        falling[0], (6 * x[0, 0, :6].var(0, correction=0)).sort(descending=True)[0]
    )
