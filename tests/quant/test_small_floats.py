"""Parameters in 8 bits: the bits as drawn, rounding to the nearest, levels about their middle."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from duotone.quant import TensorSpec, quantize, scheme
from duotone.quant.small_floats import (
    MIDDLE,
    SCALE,
    SmallFloat,
    from_bytes,
    lowest_levels,
    small_levels,
    to_bytes,
)

FORMS = {"scale": SCALE, "middle": MIDDLE}
BOTH = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def rows(form: SmallFloat, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    size = (torch.randn(200, 33, generator=random) * spread).exp()
    size = size * (torch.randn(200, 1, generator=random) * 3).exp()
    sign = torch.randn(200, 33, generator=random).sign() if form.signed else 1.0
    return (size * sign).clamp(-60000, 60000).half()


def test_the_bits_lie_as_drawn() -> None:
    one_and_a_half, half = 0b11111000, 0b11100000
    assert to_bytes(torch.tensor([1.5, 0.5, 0.0]), SCALE).tolist() == [127, one_and_a_half, half, 0]
    negative = 0b11101000
    assert to_bytes(torch.tensor([-0.75, 1.5]), MIDDLE).tolist() == [135, negative, 0b01111000]
    # 2 ** -14 of a row's binade is the lowest normal scale, a sixteenth of it the last step.
    least = torch.tensor([1.0, 2.0**-14, 2.0**-18, 2.0**-19])
    assert to_bytes(least, SCALE).tolist() == [127, 0b11110000, 0b00010000, 1, 0]


@BOTH
def test_every_byte_is_an_fp16_number_and_keeps_its_bytes(form: SmallFloat) -> None:
    first = torch.arange(form.least, 16)[:, None] + form.bias
    codes = torch.arange(256)[None].expand(len(first), -1)
    # The largest code fixes the exponent.
    made = torch.cat([first, codes], 1).to(torch.uint8)
    numbers = from_bytes(made, form)
    wide = codes.double() if not form.signed else (codes & 127).double()
    exponent = (wide // 16).clamp_min(1) - 15
    value = torch.where(wide < 16, wide / 16, 1 + wide % 16 / 16) * 2.0**exponent
    value = value * 2.0 ** (first.double() - 127)
    if form.signed:
        value = torch.where(codes > 127, -value, value)
    assert torch.equal(numbers.double(), value)
    again = to_bytes(numbers, form)
    assert torch.equal(from_bytes(again, form), numbers)
    assert torch.equal(again[:, 0], made[:, 0])


@BOTH
@pytest.mark.parametrize("spread", [0.2, 2.0, 5.0])
def test_rounding_is_to_the_nearest(form: SmallFloat, spread: float) -> None:
    x = rows(form, spread=spread)
    codes = to_bytes(x, form)
    every = torch.arange(256, dtype=torch.uint8).expand(len(x), -1)
    levels = from_bytes(torch.cat([codes[:, :1], every], 1), form).double()
    near = (x.double()[:, :, None] - levels[:, None]).abs().amin(-1)
    assert torch.equal((from_bytes(codes, form).double() - x.double()).abs(), near)
    assert torch.equal(codes, to_bytes(from_bytes(codes, form), form))


@BOTH
def test_numbers_of_the_upper_binades_are_off_by_a_32nd_at_most(form: SmallFloat) -> None:
    x = rows(form)
    error = (from_bytes(to_bytes(x, form), form).double() - x.double()).abs()
    high = x.abs() > x.abs().amax(-1, keepdim=True) * 2.0 ** (1 - form.binades)
    assert (error[high] / x.double().abs()[high]).max() <= 1 / 32
    # A row of small numbers keeps fp16's own steps below that.
    tiny = x.float() * 2.0**-24
    assert (from_bytes(to_bytes(tiny, form), form).float() - tiny).abs().max() <= x.abs().max() / 32


@BOTH
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_decodes_to_nothing_finite(form: SmallFloat, bad: float) -> None:
    x = torch.tensor([[1.0, bad, 2.0], [1.0, 2.0, 3.0]])
    numbers = from_bytes(to_bytes(x, form), form)
    assert not numbers[0].isfinite().any()
    assert numbers[1].isfinite().all()


def test_negative_scales_become_0_and_rows_of_0_stay() -> None:
    assert from_bytes(to_bytes(torch.tensor([-1.0, 2.0]), SCALE), SCALE).tolist() == [0, 2]
    for form in FORMS.values():
        assert from_bytes(to_bytes(torch.zeros(2, 3), form), form).tolist() == [[0] * 3] * 2


@given(st.integers(0, 99), st.sampled_from([1, 3, 7, 15]))
def test_levels_keep_their_middle_to_a_32nd_of_it(seed: int, top: int) -> None:
    scale, zero = rows(SCALE, seed, 1.0), rows(MIDDLE, seed, 0.2)
    rounded = small_levels(scale[:, :20], zero, top)
    kept = [from_bytes(*x) for x in zip(rounded, (SCALE, MIDDLE), strict=True)]
    full = [F.pad(s.double(), (0, 33 - 20)) for s in (scale[:, :20], kept[0])]
    middle = (zero.double() + full[0] * (top / 2)).clamp(-63488, 63488)  # the largest number
    step = torch.maximum(middle.abs() / 16, middle.abs().amax(-1, keepdim=True) * 2.0**-10)
    assert ((kept[1].double() - middle).abs() <= step / 2 * (1 + 1e-6)).all()
    # The lowest level lies half of the rounded levels' width below.
    lowest = lowest_levels(*kept, top)
    assert torch.equal(lowest, (kept[1].double() - full[1] * (top / 2)).float())


def test_a_middle_of_wide_levels_loses_less_than_their_lowest_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 1000, 32)
    plain, small = (quantize(x, TensorSpec(4, param_dtype=p)) for p in ("float16", "float8"))
    errors = [(q.dequantize() - x).square().mean() for q in (plain, small)]
    # The lowest level, some 3.5 from the mean, in steps of 1 / 8: 8 % more.
    assert errors[1] < 1.03 * errors[0]


@pytest.mark.parametrize("classes", [None, ((4, 1 / 8), (2, 1 / 4))])
def test_decoded_levels_are_those_of_fp16_rounded(classes: tuple | None) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 100, 32) * torch.linspace(0.1, 3, 32) + torch.randn(32)
    spec = TensorSpec(2, levels="lloyd", gain="fit", energy=1.0, classes=classes)
    plain, small = (quantize(x, s) for s in (spec, spec.replace(param_dtype="float8")))
    assert torch.equal(plain.codes, small.codes)
    bits = torch.tensor([4, 2, 0])[small.classes.long()] if classes else torch.tensor(2)
    top = 2.0**bits - 1
    scales, middles = small_levels(plain.scale, plain.zero_point, top)
    assert torch.equal(from_bytes(scales, SCALE), small.scale)
    assert torch.equal(from_bytes(middles, MIDDLE), small.zero_point)
    assert torch.equal(lowest_levels(small.scale, small.zero_point, top), small.offset)
    errors = [(q.dequantize() - x).square().mean() for q in (plain, small)]
    assert errors[0] < errors[1] < 1.03 * errors[0]


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_the_default_has_parameters_of_8_bits_where_codes_are_fewer(bits: int) -> None:
    expected = "float16" if bits == 8 else "float8"
    assert {tensor.param_dtype for tensor in scheme("duotone", bits=bits).tensors} == {expected}
