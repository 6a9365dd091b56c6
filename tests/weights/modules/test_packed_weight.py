"""Packing of 4-bit weights, and what the record refuses."""

import pytest
import torch

from duotone.weights.modules.packed_weight import PackedWeight, pack_int4, unpack_int4

from linear_cases import random_weight


def test_all_codes_come_back_low_nibble_first() -> None:
    codes = torch.arange(-8, 8, dtype=torch.int8).reshape(2, 8)
    packed = pack_int4(codes)
    assert packed.dtype == torch.uint8
    assert packed[0, 0] == 0x98  # -8 in the low nibble, -7 in the high one
    assert torch.equal(unpack_int4(packed), codes)


def test_what_does_not_fit_raises() -> None:
    with pytest.raises(ValueError, match="even"):
        pack_int4(torch.zeros(2, 3, dtype=torch.int8))
    with pytest.raises(ValueError, match="-8"):
        pack_int4(torch.full((2, 4), 9, dtype=torch.int8))
    codes = torch.zeros(4, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match="scale"):
        PackedWeight(codes, 8, torch.ones(3))
    with pytest.raises(ValueError, match="scale must be contiguous"):
        PackedWeight(codes, 8, torch.ones(2, 4).T, 4)
    with pytest.raises(ValueError, match="codes must be contiguous"):
        PackedWeight(torch.zeros(8, 4, dtype=torch.int8).T, 8, torch.ones(4))


def test_some_channels_have_their_part_of_everything() -> None:
    weight, part = random_weight(9, 64, 4, group=32, split=True), slice(4, 8)
    some = weight.rows(part)
    assert torch.equal(some.dequantized(), weight.dequantized()[part])
    assert torch.equal(some.w0, weight.w0[part])
    assert some.codes.data_ptr() == weight.codes[4:].data_ptr()


@pytest.mark.parametrize(("bits", "group"), [(4, None), (4, 32), (8, None)])
def test_dequantized(bits: int, group: int | None) -> None:
    weight = random_weight(6, 64, bits, group=group)
    scale = weight.scale.repeat_interleave(group, 1) if group else weight.scale[:, None]
    assert torch.equal(weight.dequantized(), weight.unpacked().float() * scale)
    assert weight.shape == (6, 64)
