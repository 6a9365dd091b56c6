import pytest
import torch
from torch import nn

from duotone.weights.equivalences.hadamard import plan_hadamard
from duotone.weights.equivalences.module_map import Block, ValueHeads, at, put, set_data
from duotone.weights.equivalences.online import (
    RotatedInput,
    head_plan,
    is_rotated,
    rotate_online,
    rotate_values,
)

from exactly import assert_same


@pytest.mark.parametrize("size", [7, 100, 111, 192])
@pytest.mark.parametrize("bias", [True, False])
def test_the_linear_stays_the_same(size, bias):
    linear, x = nn.Linear(size, 5, bias=bias).double(), torch.randn(3, size).double()
    expected = linear(x)
    plan = plan_hadamard(size)
    turned = RotatedInput.around(linear, plan)
    assert_same(turned(x), expected)
    assert (turned.in_features, turned.out_features) == (size, 5)
    assert turned.linear.in_features == plan.padded
    assert (turned.linear.bias is None) is not bias


def block_of(head_dim, heads):
    values = ValueHeads("v", heads, head_dim)
    return Block(
        attention_inputs=("v",), attention_output="o", mlp_inputs=(), mlp_output="o", values=values
    )


@pytest.mark.parametrize(("head_dim", "base"), [(16, 1), (20, 20), (24, 12), (30, 1)])
def test_heads_share_the_turn_of_their_values(head_dim, base):
    """Two kv heads, four q heads: each output head is a mixture of its kv head's values."""
    model = nn.ModuleDict({"v": nn.Linear(9, 2 * head_dim), "o": nn.Linear(4 * head_dim, 6)})
    model.double()
    x = torch.randn(5, 9).double()

    def run():
        values = model["v"](x).unflatten(-1, (2, head_dim)).repeat_interleave(2, 1)
        return model["o"](values.flatten(1))

    expected, before = run(), model["v"].weight.clone()
    rotate_values(model, block_of(head_dim, 2))
    assert_same(run(), expected)
    assert head_plan(head_dim).base == base
    assert not torch.equal(model["v"].weight, before)


def test_wrong_targets_are_refused():
    model = nn.ModuleDict({"v": nn.Linear(8, 8), "o": nn.Linear(9, 6)})
    with pytest.raises(ValueError, match="whole heads of 4; got 9"):
        rotate_values(model, block_of(4, 2))
    rotate_online(model, "v", plan_hadamard(8))
    assert is_rotated(model)
    with pytest.raises(ValueError, match="needs a linear at 'v'; got RotatedInput"):
        rotate_online(model, "v", plan_hadamard(8))
    with pytest.raises(ValueError, match=r"has no 'o.q': 'q' is missing in Linear"):
        at(model, "o.q")
    with pytest.raises(ValueError, match="has no 'w'"):
        put(model, "w", nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"expected shape \(6,\)"):
        set_data(model["o"].bias, torch.zeros(5))
