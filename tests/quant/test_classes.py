import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duotone.quant import TensorSpec, bits_per_element, quantize
from duotone.quant.classes import (
    assign_classes,
    class_counts,
    class_order,
    coded_channels,
    pack_classes,
    unpack_classes,
)

SPEC = TensorSpec(1, classes=((4, 1 / 8), (2, 1 / 4)))


def test_counts_are_shares_and_the_rest_gets_nothing() -> None:
    assert class_counts(SPEC, 64) == [(4, 8), (2, 16), (0, 40)]
    assert coded_channels(SPEC, 64) == 24
    assert SPEC.nominal_bits == 1.0
    with pytest.raises(ValueError, match="whole channels"):
        class_counts(SPEC, 12)


def test_the_largest_variances_get_the_most_bits() -> None:
    variance = torch.tensor([1.0, 9.0, 3.0, 3.0, 0.0, 5.0, 2.0, 0.5])
    assert assign_classes(variance, SPEC).tolist() == [2, 0, 1, 2, 2, 1, 2, 2]


@given(st.integers(0, 99), st.sampled_from([8, 16, 64]))
def test_packing_by_class_is_exact(seed: int, channels: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.cat(
        [
            torch.randint(0, 1 << bits, (3, 5, count), generator=generator, dtype=torch.uint8)
            for bits, count in class_counts(SPEC, channels)
        ],
        -1,
    )
    assert torch.equal(unpack_classes(pack_classes(codes, SPEC), SPEC, channels), codes)


@given(st.integers(0, 99))
def test_order_sorts_by_class_and_keeps_channels_in_order(seed: int) -> None:
    numbers = assign_classes(torch.rand(2, 16, generator=torch.Generator().manual_seed(seed)), SPEC)
    order = class_order(numbers)
    assert (numbers.gather(-1, order).diff() >= 0).all()
    assert torch.equal(order.sort(-1).values, torch.arange(16).expand(2, -1))


@pytest.mark.parametrize("group", [None, 20])
def test_each_channel_is_quantized_at_its_own_width(group: int | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 60, 16) * torch.logspace(0, -3, 16)[torch.randperm(16)] + torch.randn(16)
    spec = SPEC.replace(group=group, levels="lloyd", param_dtype="float32")
    q = quantize(x, spec)
    for block in range(q.scale.shape[1]):
        rows = slice(block * (group or 60), (block + 1) * (group or 60))
        for channel in range(16):
            piece, number = x[:1, rows, channel : channel + 1], q.classes[0, block, channel]
            bits = class_counts(spec, 16)[int(number)][0]
            decoded = q.dequantize()[:1, rows, channel : channel + 1]
            if bits:
                alone = TensorSpec(bits, levels="lloyd", param_dtype="float32")
                assert torch.allclose(decoded, quantize(piece, alone).dequantize(), atol=1e-6)
            else:
                assert torch.allclose(decoded, piece.mean().expand_as(decoded), atol=1e-5)


def test_unequal_channels_beat_equal_bits_at_the_same_size() -> None:
    """Water-filling is for this; the gap is the arithmetic over the geometric mean variance."""
    torch.manual_seed(0)
    x = torch.randn(1, 256, 64) * torch.logspace(1, -1, 64)
    flat = quantize(x, TensorSpec(1, levels="lloyd")).dequantize()
    classes = quantize(x, SPEC.replace(levels="lloyd")).dequantize()
    assert (classes - x).square().mean() < 0.2 * (flat - x).square().mean()


def test_true_bits_count_class_numbers_and_missing_scales() -> None:
    codes, params = 1.0, (64 + 24) * 16 / (64 * 256)
    numbers = 2 * 64 / (64 * 256)
    assert bits_per_element(SPEC, 256, 64) == codes + params + numbers
