"""The slot that a hybrid's zero_points and signs share, bit by bit and as a law."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duotone.quant import TensorSpec
from duotone.quant.slots import (
    fill_slots,
    group_elements,
    has_slot,
    slot_bytes,
    slot_signs,
    slot_zero_points,
)

DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32])


@given(DTYPES, st.integers(1, 70), st.integers(0, 3), st.integers(0, 99))
def test_what_goes_in_comes_out(dtype: torch.dtype, elements: int, fill: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    zero_point = torch.randn(3, 5, generator=random).to(dtype)
    negative = torch.rand(3, 5, elements, generator=random) < 0.5
    symmetric = torch.rand(3, 5, generator=random) < 0.5
    width = max(dtype.itemsize, -(-elements // 8)) + fill
    slots = fill_slots(zero_point, negative, symmetric, width)
    assert slots.shape == (3, 5, width)
    assert torch.equal(slot_zero_points(slots, symmetric, dtype), zero_point * ~symmetric)
    assert torch.equal(slot_signs(slots, symmetric, elements), negative & symmetric[..., None])


def test_the_bits_lie_as_drawn() -> None:
    negative = torch.zeros(2, 32, dtype=torch.bool)
    negative[0, [0, 9, 31]] = True
    symmetric = torch.tensor([True, False])
    slots = fill_slots(torch.tensor([7.0, 1.0]).half(), negative, symmetric, 4)
    assert slots[0].tolist() == [0b10000000, 0b01000000, 0, 0b00000001]
    assert slots[1].tolist() == [*torch.tensor([1.0]).half().view(torch.uint8).tolist(), 0, 0]
    # The shift that kernels use: element i is bit i ^ 7 of the little-endian word.
    word = int.from_bytes(bytes(slots[0].tolist()), "little")
    assert [i for i in range(32) if word >> (i ^ 7) & 1] == [0, 9, 31]


def test_a_zero_point_in_a_symmetric_group_s_place_is_never_read() -> None:
    signs = torch.ones(1, 16, dtype=torch.bool)
    slots = fill_slots(torch.zeros(1).half(), signs, torch.tensor([True]), 2)
    assert slots.view(torch.float16).isnan().all()
    assert slot_zero_points(slots, torch.tensor([True]), torch.float16).tolist() == [0.0]


def test_signs_that_do_not_fit_raise() -> None:
    signs = torch.zeros(1, 33, dtype=torch.bool)
    with pytest.raises(ValueError, match="holds 32 signs"):
        fill_slots(torch.zeros(1).half(), signs, torch.tensor([True]), 4)


@pytest.mark.parametrize(
    ("spec", "slot"),
    [
        (TensorSpec(2, group=32, mapping="hybrid"), (32, 4)),
        (TensorSpec(2, group=3, mapping="hybrid"), (3, 2)),
        (TensorSpec(2, group=3, mapping="hybrid", param_dtype="float32"), (3, 4)),
        (TensorSpec(2, group=256, mapping="hybrid"), (256, 32)),
        (TensorSpec(2, "channels", 20, mapping="hybrid"), (20, 3)),
        (TensorSpec(2, "channels", mapping="hybrid"), (80, 10)),
        (TensorSpec(2, "channels", 512, mapping="hybrid"), (80, 10)),
        (TensorSpec(2, group=257, mapping="hybrid"), None),
        (TensorSpec(2, mapping="hybrid"), None),
        (TensorSpec(2, "span", 4, mapping="hybrid"), None),
        (TensorSpec(2, group=32, mapping="symmetric"), None),
        (TensorSpec(2, group=32), None),
    ],
)
def test_which_groups_have_slots(spec: TensorSpec, slot: tuple[int, int] | None) -> None:
    assert has_slot(spec) == (slot is not None)
    if slot is not None:
        assert (group_elements(spec, 80), slot_bytes(spec, 80)) == slot
