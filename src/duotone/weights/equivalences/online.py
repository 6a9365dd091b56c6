"""Rotations within a block: V's heads for free, and inputs of linears by an online Hadamard.

Value heads: V' = R V per head and W_o' = W_o R^T, nothing at run time. Online: a linear's input is
transformed just before it, T x, and its weight once, W T^T (padding columns are zero and no bias
appears: the released MQuant code leaves random ones in both).
"""

from __future__ import annotations

from torch import Tensor, nn

from duotone.weights.equivalences.hadamard import (
    HadamardPlan,
    exact_plan,
    plan_hadamard,
    transform,
)
from duotone.weights.equivalences.module_map import Block, ValueHeads, at, put, set_data


class RotatedInput(nn.Module):
    """linear(T x): the reference of an online Hadamard, in floating point.

    `linear` has plan.padded inputs.
    """

    def __init__(self, linear: nn.Linear, plan: HadamardPlan):
        super().__init__()
        self.linear = linear
        self.plan = plan

    @classmethod
    def around(cls, linear: nn.Linear, plan: HadamardPlan) -> RotatedInput:
        """Build a module that computes `linear` on an input transformed online."""
        weight = transform(linear.weight.data.double(), plan).to(linear.weight.dtype)
        rows, columns = weight.shape
        # Built without storage: an initialised weight or bias must not survive anywhere.
        wide = nn.Linear(columns, rows, bias=False, device="meta")
        wide.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
        wide.bias = linear.bias
        return cls(wide, plan)

    @property
    def in_features(self) -> int:
        """Channels of x."""
        return self.plan.size

    @property
    def out_features(self) -> int:
        """Channels of the output."""
        return self.linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self.linear(transform(x, self.plan))


def output_side(module: nn.Module) -> nn.Module:
    """Module that holds a linear's weight rows and bias, with or without an online transform."""
    return module.linear if isinstance(module, RotatedInput) else module


def rotate_online(model: nn.Module, path: str, plan: HadamardPlan) -> None:
    """Replace the linear at `path` by a RotatedInput."""
    linear = at(model, path)
    if not isinstance(linear, nn.Linear):
        raise ValueError(
            f"an online Hadamard needs a linear at {path!r}; got {type(linear).__name__}. "
            "Is it transformed already?"
        )
    put(model, path, RotatedInput.around(linear, plan))


def rotate_input(model: nn.Module, path: str, pad: bool = True) -> None:
    """Put an online Hadamard before the linear at `path`; pad: as for `plan_hadamard`."""
    rotate_online(model, path, plan_hadamard(at(model, path).in_features, pad))


def rotate_values(model: nn.Module, block: Block) -> None:
    """Apply R = Hadamard per head to V's rows, R^T to the columns of the output linear.

    Grouped-query attention: all q heads of a kv head read its rotated V. Errors: ValueError where
    the output linear's inputs are no multiple of head_dim.
    """
    values, output = block.values, at(model, block.attention_output)
    if output.in_features % values.head_dim:
        raise ValueError(
            f"{block.attention_output!r} must read whole heads of {values.head_dim}; "
            f"got {output.in_features} inputs."
        )
    plan = head_plan(values.head_dim)
    _turn_value_rows(output_side(at(model, values.linear)), values, plan)
    heads = output.weight.data.double().unflatten(1, (-1, values.head_dim))
    set_data(output.weight, transform(heads, plan).flatten(1))


def head_plan(head_dim: int) -> HadamardPlan:
    """The transform of one head: exact, or blocks of its largest power of two; never padded."""
    power = head_dim & -head_dim
    in_blocks = HadamardPlan(head_dim, head_dim, head_dim // power, 1, power)
    return exact_plan(head_dim) or in_blocks


def _turn_value_rows(linear: nn.Linear, values: ValueHeads, plan: HadamardPlan) -> None:
    rows = slice(values.first_row, values.first_row + values.heads * values.head_dim)
    for parameter in (linear.weight, linear.bias):
        if parameter is None:
            continue
        heads = parameter.data[rows].double().unflatten(0, (values.heads, values.head_dim))
        rotated = transform(heads.movedim(1, -1), plan).movedim(-1, 1)
        set_data(parameter.data[rows], rotated.flatten(0, 1))


def is_rotated(module: nn.Module) -> bool:
    """True if any linear of a model is transformed online already."""
    return any(isinstance(m, RotatedInput) for m in module.modules())
