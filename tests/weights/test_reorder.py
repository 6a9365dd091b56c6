import pytest
import torch

from duotone.weights.reorder import (
    inverse,
    row_scales,
    slices,
    take,
    take_mask,
    take_positions,
    visibility,
    visual_first,
)

VISUAL = torch.tensor([[0, 1, 1, 0, 1, 0, 0], [0, 0, 0, 0, 1, 1, 0]]).bool()
REAL = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]]).bool()


def test_padding_then_visual_then_text():
    order = visual_first(VISUAL, REAL)
    assert order.tolist() == [[1, 2, 4, 0, 3, 5, 6], [0, 1, 4, 5, 2, 3, 6]]
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


def test_the_mask_is_the_causal_one_permuted():
    order = visual_first(VISUAL, REAL)
    causal = torch.ones(7, 7).tril().bool() & REAL[:, None]
    causal |= torch.eye(7).bool()
    ours = visibility(order, order, REAL.gather(1, order))
    assert torch.equal(ours[:, None], take_mask(causal[:, None], order, order))


def test_positions_of_all_axes():
    order = visual_first(VISUAL)
    positions = torch.randint(0, 9, (3, 2, 7))
    assert torch.equal(take_positions(positions, order)[2, 1], positions[2, 1, order[1]])
    assert torch.equal(take_positions(torch.arange(7)[None], order), order)


def codes(x, scale):
    return (x / scale).round().clamp(-127, 127).to(torch.int8)


def product(x, w):
    return x.int() @ w.int().T


def test_msq_by_rows_by_slices_and_reordered_are_the_same_integers():
    torch.manual_seed(0)
    x, w = torch.randn(2, 7, 40), torch.randint(-8, 8, (5, 40))
    x[VISUAL] *= 20
    visual_scale, text_scale = 0.5, 0.03
    scales = row_scales(VISUAL & REAL, visual_scale, text_scale)
    by_row = product(codes(x, scales[..., None]), w)

    by_slice = torch.empty_like(by_row)
    for where, scale in ((VISUAL & REAL, visual_scale), (~(VISUAL & REAL), text_scale)):
        by_slice[where] = product(codes(x[where], torch.tensor(scale)), w)

    order, count = slices(VISUAL, REAL)
    rows = x.flatten(0, 1)[order]
    both = [
        product(codes(rows[:count], torch.tensor(visual_scale)), w),
        product(codes(rows[count:], torch.tensor(text_scale)), w),
    ]
    reordered = torch.cat(both)[order.argsort()].view(2, 7, 5)
    assert torch.equal(by_slice, by_row)
    assert torch.equal(reordered, by_row)
    one_scale = product(codes(x, torch.tensor(visual_scale)), w)
    assert not torch.equal(one_scale, by_row)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="must be boolean"):
        visual_first(VISUAL.int())
    with pytest.raises(ValueError, match="must be boolean"):
        visual_first(VISUAL, REAL[:, 1:])
    order = visual_first(VISUAL)
    with pytest.raises(ValueError, match="cannot reorder"):
        take(torch.zeros(2, 6), order)
    with pytest.raises(ValueError, match="7 queries and 7 keys"):
        take_mask(torch.zeros(2, 1, 7, 6), order, order)
