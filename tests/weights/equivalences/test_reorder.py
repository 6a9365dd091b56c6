import pytest
import torch

from duotone.weights.equivalences.reorder import (
    inverse,
    take,
    take_mask,
    take_positions,
    visibility,
    visual_first,
)

VISUAL = torch.tensor([[0, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1, 0]]).bool()
REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]]).bool()


def test_visual_tokens_then_all_others():
    order = visual_first(VISUAL)
    assert order.tolist() == [[1, 2, 4, 0, 3, 5, 6], [4, 5, 0, 1, 2, 3, 6]]
    x = torch.randn(2, 7, 3)
    assert torch.equal(take(take(x, order), inverse(order)), x)
    assert visual_first(torch.zeros(1, 3).bool()).tolist() == [[0, 1, 2]]


def test_eq_5_for_one_image():
    """Text before the image (m tokens), n visual, text after: the mask of the paper's eq. 5."""
    m, n, after = 2, 3, 2
    visual = torch.tensor([[0] * m + [1] * n + [0] * after]).bool()
    order = visual_first(visual)
    seen = visibility(order, order)[0]
    size = m + n + after
    expected = torch.ones(size, size).tril().bool()
    expected[:n, n : n + m] = True
    expected[n : n + m, :n] = False
    assert torch.equal(seen, expected)


@pytest.mark.parametrize("keys", ["moved", "in place"])
def test_the_mask_is_the_causal_one_permuted(keys):
    order = visual_first(VISUAL)
    causal = torch.ones(7, 7).tril().bool() & REAL[:, None]
    causal |= torch.eye(7).bool()
    held = order if keys == "moved" else torch.arange(7).expand(2, -1)
    ours = visibility(order, held, REAL.gather(1, held))
    wanted = take_mask(causal[:, None], order, order if keys == "moved" else None)
    assert torch.equal(ours[:, None], wanted)


def test_positions_of_all_axes():
    order = visual_first(VISUAL)
    positions = torch.randint(0, 9, (3, 2, 7))
    assert torch.equal(take_positions(positions, order)[2, 1], positions[2, 1, order[1]])
    assert torch.equal(take_positions(torch.arange(7)[None], order), order)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="must be boolean"):
        visual_first(VISUAL.int())
    with pytest.raises(ValueError, match="must be boolean"):
        visual_first(VISUAL[0])
    order = visual_first(VISUAL)
    with pytest.raises(ValueError, match="cannot reorder"):
        take(torch.zeros(2, 6), order)
    with pytest.raises(ValueError, match="7 queries and 7 keys"):
        take_mask(torch.zeros(2, 1, 7, 6), order, order)
