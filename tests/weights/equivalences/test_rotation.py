import pytest
import torch
from torch import nn

from duotone.weights.equivalences.rotation import (
    check_orthogonal,
    fold_scale,
    keeping_mean,
    map_output,
    map_rows,
    random_hadamard,
    random_orthogonal,
    turn_input,
    untie,
)

from exactly import assert_same


@pytest.mark.parametrize("size", [1, 2, 12, 30, 47, 64])
def test_matrices_are_orthogonal_and_reproducible(size):
    for make in (random_hadamard, random_orthogonal):
        check_orthogonal(make(size, seed=3), size)
        assert torch.equal(make(size, seed=3), make(size, seed=3))
    kept = keeping_mean(random_hadamard(size, seed=3))
    check_orthogonal(kept, size)
    ones = torch.ones(size, dtype=torch.float64)
    assert_same(kept @ ones, ones)


def test_a_matrix_that_keeps_the_mean_is_left_alone():
    eye = torch.eye(5, dtype=torch.float64)
    assert torch.equal(keeping_mean(eye), eye)


def test_what_is_no_rotation_is_refused():
    with pytest.raises(ValueError, match="must be float64"):
        check_orthogonal(torch.eye(4), 4)
    with pytest.raises(ValueError, match="must be float64"):
        check_orthogonal(torch.eye(4).double(), 5)
    with pytest.raises(ValueError, match="differs from I"):
        check_orthogonal(2 * torch.eye(4).double(), 4)


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_are_turned(bias):
    q, linear = random_orthogonal(6), nn.Linear(4, 6, bias=bias).double()
    conv, x = nn.Conv2d(3, 6, 2, bias=bias).double(), torch.randn(2, 4).double()
    pixels = torch.randn(2, 3, 2, 2).double()
    expected = linear(x) @ q.T, conv(pixels).flatten(1) @ q.T
    map_output(linear, q)
    map_output(conv, q)
    assert_same(linear(x), expected[0])
    assert_same(conv(pixels).flatten(1), expected[1])


def test_inputs_are_turned_per_token():
    q, linear = random_orthogonal(4), nn.Linear(12, 5).double()
    conv = nn.Conv2d(4, 5, 2).double()
    x, tokens = torch.randn(2, 3, 4).double(), torch.randn(1, 2, 2, 4).double()
    expected = linear(x.flatten(1)), conv(tokens.permute(0, 3, 1, 2))
    turn_input(linear, q)
    turn_input(conv, q)
    assert_same(linear((x @ q.T).flatten(1)), expected[0])
    assert_same(conv((tokens @ q.T).permute(0, 3, 1, 2)), expected[1])
    with pytest.raises(ValueError, match="multiple of them; got 5 inputs"):
        turn_input(nn.Linear(5, 1), q)


def test_rows_keep_their_type():
    q, rows = random_orthogonal(8), nn.Parameter(torch.randn(3, 1, 8).bfloat16())
    expected = (rows.double() @ q.T).bfloat16()
    map_rows(rows, q)
    assert torch.equal(rows, expected)


def test_a_scale_moves_into_the_linear():
    linear, scale, x = nn.Linear(3, 4), nn.Parameter(torch.randn(4)), torch.randn(2, 3)
    expected = linear(x) * scale
    fold_scale(linear, scale)
    torch.testing.assert_close(linear(x) * scale, expected)
    assert torch.equal(scale, torch.ones(4))


def test_only_a_tied_head_is_copied():
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    assert not untie(embedding, head)
    head.weight = embedding.weight
    assert untie(embedding, head)
    assert head.weight is not embedding.weight
    assert torch.equal(head.weight, embedding.weight)
