"""Laws of the quantizers, for every point of the space."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duotone.quant import Quantized, TensorSpec, bits_per_element, pack, quantize
from duotone.quant.affine import check_finite, expand_parameter
from duotone.quant.ranges import nearest_code

ALL_SPECS = [
    TensorSpec(bits, along, group, mapping, levels=levels, param_dtype="float32")
    for bits, along, group, mapping, levels in itertools.product(
        (1, 2, 3, 4, 8),
        ("tokens", "channels", "span"),
        (None, 32, 7),
        ("asymmetric", "symmetric", "hybrid"),
        ("uniform", "lloyd"),
    )
]


def spec_id(spec: TensorSpec) -> str:
    return f"{spec.bits}b-{spec.along}-g{spec.group}-{spec.mapping}-{spec.levels}"


def gaussian(tokens: int, channels: int, seed: int = 0) -> Tensor:
    x = torch.randn(2, tokens, channels, generator=torch.Generator().manual_seed(seed))
    return x * (1 + 3 * torch.rand(channels)) + torch.randn(channels)


SPECS = st.sampled_from(ALL_SPECS)
SIZES = st.tuples(st.sampled_from([1, 2, 31, 63, 100]), st.sampled_from([1, 8, 40]))


def per_element(q: Quantized, parameter: Tensor) -> Tensor:
    return expand_parameter(parameter, q.spec, *q.codes.shape[-2:])


@given(SPECS, SIZES, st.integers(0, 99))
def test_shapes_and_code_range(spec: TensorSpec, size: tuple[int, int], seed: int) -> None:
    x = gaussian(*size, seed)
    q = quantize(x, spec)
    assert q.dequantize().shape == x.shape
    assert q.dequantize().dtype == x.dtype
    assert int(q.codes.max()) < 1 << spec.bits
    pack(q.codes, spec.bits)


@given(SPECS, SIZES, st.integers(0, 99))
def test_error_is_half_a_step_inside_the_range(
    spec: TensorSpec, size: tuple[int, int], seed: int
) -> None:
    """|x - x_hat| <= scale / 2 wherever x lies between the end levels."""
    x = gaussian(*size, seed)
    q = quantize(x, spec)
    scale, low = per_element(q, q.scale), torch.zeros_like(x)
    if q.zero_point is not None:
        low = per_element(q, q.zero_point)
    top = low + scale * ((1 << spec.bits) - 1)
    # Sign-and-magnitude groups reach from -top to top.
    signed = torch.zeros_like(x, dtype=torch.bool)
    if spec.mapping == "symmetric":
        signed = torch.ones_like(signed)
    if spec.mapping == "hybrid":
        signed = per_element(q, q.symmetric.float()).bool()
    inside = torch.where(signed, x.abs() <= top, (x >= low) & (x <= top))
    error = (q.dequantize() - x).abs()
    assert (error <= scale / 2 * (1 + 1e-4) + 1e-6)[inside].all()


# Not the hybrids: they choose by absolute error, Lloyd descends by squared error.
LLOYD_SPECS = [s for s in ALL_SPECS if s.levels == "uniform" and s.mapping != "hybrid"]


@pytest.mark.parametrize("spec", LLOYD_SPECS, ids=spec_id)
def test_lloyd_never_loses_to_min_max(spec: TensorSpec) -> None:
    x = gaussian(63, 40)
    uniform = (quantize(x, spec).dequantize() - x).square().mean()
    lloyd = (quantize(x, spec.replace(levels="lloyd")).dequantize() - x).square().mean()
    assert lloyd <= uniform * (1 + 1e-5)


@pytest.mark.parametrize("mapping", ["symmetric", "hybrid"])
def test_lloyd_moves_signed_levels_too(mapping: str) -> None:
    x = torch.randn(1, 4096, 8, generator=torch.Generator().manual_seed(0))
    uniform, lloyd = (
        (quantize(x, TensorSpec(2, group=32, mapping=mapping, levels=n)).dequantize() - x)
        for n in ("uniform", "lloyd")
    )
    assert lloyd.square().mean() < 0.9 * uniform.square().mean()


def test_lloyd_at_1_bit_stores_the_conditional_means() -> None:
    x = gaussian(200, 8)
    q = quantize(x, TensorSpec(1, levels="lloyd", param_dtype="float32"))
    for code in (0, 1):
        chosen = q.codes == code
        mean = (x * chosen).sum(1, keepdim=True) / chosen.sum(1, keepdim=True)
        assert torch.allclose(q.zero_point + code * q.scale, mean, atol=1e-4)


def test_gaussian_1_bit_error_is_the_known_optimum() -> None:
    """1 - 2/pi of the variance, for the two conditional means of a Gaussian."""
    x = torch.randn(1, 50_000, 4, dtype=torch.float64)
    q = quantize(x, TensorSpec(1, levels="lloyd", param_dtype="float32"))
    assert (q.dequantize() - x).square().mean().item() == pytest.approx(1 - 2 / torch.pi, rel=0.02)


@given(SPECS, SIZES, st.floats(-100, 100), st.floats(0.3, 1.0))
def test_constant_groups_decode_exactly(
    spec: TensorSpec, size: tuple[int, int], value: float, shrink: float
) -> None:
    x = torch.full((2, *size), value)
    assert torch.equal(quantize(x, spec.replace(shrink=shrink)).dequantize(), x)
    if spec.mapping == "asymmetric":
        moved = quantize(x, spec.replace(eta=0.2, gain=1.4)).dequantize()
        assert torch.equal(moved, x)


@given(SPECS, st.integers(1, 20), st.integers(0, 99))
def test_padding_enters_no_statistic(spec: TensorSpec, pads: int, seed: int) -> None:
    x = gaussian(40, 8, seed)
    mask = torch.ones(2, 40 + pads, dtype=torch.bool)
    mask[:, 40:] = False
    padded = torch.cat([x, torch.full((2, pads, 8), float("nan"))], 1)
    clean = quantize(x, spec.replace(group=spec.group and 8))
    q = quantize(padded, spec.replace(group=spec.group and 8), mask)
    assert torch.equal(q.dequantize()[:, :40], clean.dequantize())
    assert (q.codes[:, 40:] == 0).all()


def test_ties_go_up() -> None:
    """One rule, floor(t + 1/2), where torch's rounding would go to even."""
    x = torch.tensor([0.0, 0.5, 1.5, 2.5, 3.0])
    codes = nearest_code(x, torch.ones(1), torch.zeros(1), bits=2)
    assert codes.tolist() == [0, 1, 2, 3, 3]
    x = torch.tensor([[0.0], [1.0], [0.5]])
    assert quantize(x, TensorSpec(1)).codes.flatten().tolist() == [0, 1, 1]


def test_known_answer_of_equations_3_and_4() -> None:
    x = torch.tensor([[0.0], [1.0], [2.0], [6.0]])
    q = quantize(x, TensorSpec(2))
    assert q.codes.flatten().tolist() == [0, 1, 1, 3]
    assert (q.scale.item(), q.zero_point.item()) == (2.0, 0.0)
    assert q.dequantize().flatten().tolist() == [0, 2, 2, 6]


def test_shrink_is_about_zero_and_moves_the_threshold() -> None:
    """CalibQuant's code: min and max times the factor, then quantize."""
    x = torch.tensor([[-2.0], [1.0], [4.0]])
    q = quantize(x, TensorSpec(1, shrink=0.5))
    assert (q.zero_point.item(), q.scale.item()) == (-1.0, 3.0)
    assert q.dequantize().flatten().tolist() == [-1, 2, 2]


@given(st.sampled_from([1, 2, 3, 4, 8]), st.floats(0, 0.49), st.floats(0.5, 2))
def test_eta_and_gain_leave_codes_alone(bits: int, eta: float, gain: float) -> None:
    x = gaussian(50, 8)
    plain = quantize(x, TensorSpec(bits, param_dtype="float32"))
    moved = quantize(x, TensorSpec(bits, eta=eta, param_dtype="float32"))
    assert torch.equal(plain.codes, moved.codes)
    # XQuant eq. 12, with the factor 2**B - 1 that its Algorithm 2 forgets.
    top = (1 << bits) - 1
    assert torch.allclose(moved.zero_point, plain.zero_point + eta * plain.scale * top, atol=1e-5)
    assert torch.allclose(moved.scale, (1 - 2 * eta) * plain.scale, atol=1e-6)
    louder = quantize(x, TensorSpec(bits, gain=gain, param_dtype="float32"))
    mean = x.mean(1, keepdim=True)
    expected = mean + gain * (plain.dequantize() - mean)
    assert torch.equal(plain.codes, louder.codes)
    assert torch.allclose(louder.dequantize(), expected, atol=1e-4)


def test_fitted_gain_makes_scores_along_common_directions_unbiased() -> None:
    """A factor that all channels share: plain Lloyd signs shrink its scores, the fit does not."""
    torch.manual_seed(0)
    factor = torch.randn(1, 1, 64)
    x = torch.randn(2, 256, 64) / 2 + torch.randn(2, 256, 1) * factor

    def slope(gain: float | str) -> float:
        spec = TensorSpec(1, levels="lloyd", gain=gain, param_dtype="float32")
        exact, coded = x @ factor[0, 0], quantize(x, spec).dequantize() @ factor[0, 0]
        exact, coded = (s - s.mean(-1, keepdim=True) for s in (exact, coded))
        return float((exact * coded).sum() / (coded * coded).sum())

    assert slope(1.0) > 1.2
    assert slope("fit") == pytest.approx(1.0, abs=0.02)


@given(st.integers(1, 40), st.integers(0, 99))
def test_fitted_gain_ignores_padding_and_constant_blocks(tokens: int, seed: int) -> None:
    spec = TensorSpec(1, levels="lloyd", gain="fit")
    x = gaussian(tokens, 8, seed)
    padded = torch.cat([x, torch.full((2, 5, 8), float("nan"))], 1)
    mask = torch.arange(tokens + 5).expand(2, -1) < tokens
    clean = quantize(x, spec).dequantize()
    assert torch.allclose(quantize(padded, spec, mask).dequantize()[:, :tokens], clean, atol=1e-2)
    constant = torch.full((1, tokens, 8), 2.5)
    assert torch.equal(quantize(constant, spec).dequantize(), constant)


@given(st.sampled_from(["tokens", "channels"]), st.sampled_from([1, 2, 4]), st.integers(0, 99))
def test_hybrid_never_exceeds_either_mode(along: str, bits: int, seed: int) -> None:
    x = gaussian(64, 64, seed)

    def errors(mapping: str) -> Tensor:
        spec = TensorSpec(bits, along, 32, mapping, param_dtype="float32")
        error = (quantize(x, spec).dequantize() - x).abs()
        error = error if along == "channels" else error.transpose(1, 2)
        return error.unflatten(-1, (-1, 32)).sum(-1)

    best = torch.minimum(errors("asymmetric"), errors("symmetric"))
    assert (errors("hybrid") <= best * (1 + 1e-5)).all()


def test_a_2_bit_symmetric_group_has_7_levels() -> None:
    x = torch.linspace(-3, 3, 32)[:, None]
    q = quantize(x, TensorSpec(2, group=32, mapping="symmetric"))
    assert sorted(set(q.dequantize().flatten().tolist())) == [-3, -2, -1, 0, 1, 2, 3]


def test_integers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"got torch\.int64"):
        check_finite(torch.arange(4))


@pytest.mark.parametrize("where", [(0, 0, 0), (1, 5, 3)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_input_raises_and_says_where(where: tuple[int, ...], value: float) -> None:
    x = torch.zeros(2, 6, 4)
    x[where] = value
    with pytest.raises(ValueError, match=rf"index \({where[0]}, {where[1]}, {where[2]}\)"):
        quantize(x, TensorSpec())


def test_ranges_that_do_not_fit_raise() -> None:
    x = torch.tensor([[1e6], [2e6]])
    with pytest.raises(ValueError, match="param_dtype='bfloat16'"):
        quantize(x, TensorSpec())
    assert quantize(x, TensorSpec(param_dtype="bfloat16")).dequantize().isfinite().all()


def test_fp64_is_computed_in_fp64() -> None:
    x = torch.randn(1, 20, 4, dtype=torch.float64)
    q = quantize(x, TensorSpec(8, param_dtype="float32"))
    step = per_element(q, q.scale).double()
    assert ((q.dequantize() - x).abs() <= step / 2 * (1 + 1e-6)).all()


@pytest.mark.parametrize(
    ("spec", "tokens", "bits"),
    [
        (TensorSpec(1), 256, 1 + 32 / 256),
        (TensorSpec(1), 3328, 1 + 32 / 3328),
        (TensorSpec(2, group=32), 128, 3.0),
        (TensorSpec(1, group=32), 128, 2.0),
        (TensorSpec(2, "channels", 32), 1, 3.0),
        (TensorSpec(2, group=32, mapping="symmetric"), 64, 3.5),
        # 2 bits, a scale, the slot of zero_point or signs, the mode: InnerQ's hybrid.
        (TensorSpec(2, group=32, mapping="hybrid"), 64, 2 + (16 + 32 + 1) / 32),
        (TensorSpec(2, group=64, mapping="hybrid"), 64, 2 + (16 + 64 + 1) / 64),
        (TensorSpec(1, group=8, mapping="hybrid", param_dtype="float32"), 64, 1 + 65 / 8),
        # Modes fill whole bytes: the four of a token take eight bits.
        (TensorSpec(2, "channels", 32, mapping="hybrid"), 1, 2 + (16 + 32 + 2) / 32),
        (TensorSpec(2, "channels", mapping="hybrid"), 1, 2 + (16 + 128 + 8) / 128),
        # No slots: zero_points, and a plane of signs.
        (TensorSpec(2, mapping="hybrid"), 64, 3 + (16 + 16 + 1) / 64),
        (TensorSpec(4, param_dtype="float32"), 128, 4.5),
        (TensorSpec(1, "span"), 64, 1 + 32 / (64 * 128)),
    ],
)
def test_true_bits_count_every_byte(spec: TensorSpec, tokens: int, bits: float) -> None:
    assert bits_per_element(spec, tokens, channels=128) == bits


def test_bits_of_nothing_raise() -> None:
    with pytest.raises(ValueError, match="tokens and channels >= 1"):
        bits_per_element(TensorSpec(), 0, 128)


@pytest.mark.parametrize(("bits", "eta"), [(1, 1 / 6), (2, 0.045)])
def test_groups_of_channels_keep_end_points_that_most_lie_at(bits: int, eta: float) -> None:
    x = torch.zeros(4, 32)
    x[:, 5] = 1000.0
    x[1, 16:] += 600 * eta  # too far from both ends: half of a group
    x[2, 17:] += 600 * eta
    x[3, 5] = 0.0  # without width
    spec = TensorSpec(bits, along="channels", group=32, eta=eta, param_dtype="float32")
    off = (quantize(x, spec).dequantize() - quantize(x, spec.replace(eta=0.0)).dequantize()).abs()
    assert not off[[0, 2, 3]].any()
    assert torch.allclose(off[1], torch.full((32,), eta * 1000), rtol=0.1)


def test_eta_costs_other_groups_of_one_outlier_that_share_of_their_width() -> None:
    x = torch.zeros(1, 32)
    x[0, 5] = 1000.0
    spec = TensorSpec(2, along="channels", group=32, eta=0.045, param_dtype="float32")
    small, tokens = spec.replace(group=16), spec.replace(along="tokens")
    short_end = torch.cat([x, x[:, :16]], 1)  # its last group is half filled
    for y, of, most in (
        (x, spec, 0.0), (x, small, 45.0), (short_end, spec, 45.0), (x.T, tokens, 45.0),
    ):  # fmt: skip
        off = (quantize(y, of).dequantize() - y).abs()
        assert off.max() == pytest.approx(most, abs=0.01), of
