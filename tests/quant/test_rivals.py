"""Schemes of 2026 against their formulas, transcribed here with loops in float64."""

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import duotone
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.cache.blocks import single_block
from duotone.cache.packed import PackedTensor
from duotone.cache.packing import pack_tensor
from duotone.quant import quantize
from duotone.quant.bases import Bases
from duotone.quant.codebooks import POSITIVE
from duotone.quant.rivals import on_visual_spans
from duotone.quant.rotation import hadamard

HEADS, TOKENS, D = 2, 256, 64


@pytest.fixture
def x() -> Tensor:
    """Keys with unlike channels and unlike tokens, [1, heads, tokens, channels]."""
    torch.manual_seed(0)
    made = torch.randn(1, HEADS, TOKENS, D, dtype=torch.float64) + torch.randn(D)
    return made * torch.logspace(-0.5, 0.5, D) * torch.rand(TOKENS, 1).add(0.5)


def packed(x: Tensor, spec: TensorSpec) -> PackedTensor:
    return pack_tensor(x, spec.replace(param_dtype="float32"), single_block(torch.tensor([TOKENS])))


def text(name: str, **knobs: int) -> KVSpec:
    return duotone.scheme(name, **knobs).text


def assert_decodes(x: Tensor, spec: TensorSpec, expected: Tensor) -> None:
    """Equal but for parameters in float32, and codes at a middle within their rounding."""
    found = packed(x, spec).dequantize()
    apart = (found - expected).abs() > 1e-5 * expected.abs().max()
    assert apart.double().mean() < 1e-4


def rounded(x: float) -> float:
    return math.floor(x + 0.5)


def rtn(row: list[float], bits: int) -> list[float]:
    """Asymmetric round to nearest of one group."""
    low, high, top = min(row), max(row), 2**bits - 1
    scale = (high - low) / top
    return [min(max(rounded((v - low) / scale), 0), top) * scale + low for v in row]


def test_levels_of_the_codebook_are_those_of_lloyd_and_max() -> None:
    for half in POSITIVE.values():
        edges = [0.0, *((a + b) / 2 for a, b in pairwise(half)), math.inf]
        for level, (low, high) in zip(half, pairwise(edges), strict=True):
            density = [math.exp(-e * e / 2) / math.sqrt(2 * math.pi) for e in (low, high)]
            tails = [math.erfc(e / math.sqrt(2)) / 2 for e in (low, high)]
            assert abs((density[0] - density[1]) / (tails[0] - tails[1]) - level) < 1e-8


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_turboquant_keys_are_levels_of_a_gaussian_of_their_norm(x: Tensor, bits: int) -> None:
    levels = [-c for c in reversed(POSITIVE[bits])] + list(POSITIVE[bits])
    turned, expected = x @ hadamard(D), torch.empty_like(x)
    for h in range(HEADS):
        for t in range(TOKENS):
            row = turned[0, h, t].tolist()
            norm = math.sqrt(sum(v * v for v in row))
            unit = [v / norm * math.sqrt(D) for v in row]
            near = [min(levels, key=lambda level, v=v: abs(level - v)) for v in unit]
            length = math.sqrt(sum(c * c for c in near))
            expected[0, h, t] = torch.tensor([norm * c / length for c in near])
    spec = text("turboquant", key_bits=bits).key
    assert_decodes(x, spec, expected @ hadamard(D))
    made = packed(x, spec)
    assert made.dequantize().norm(dim=-1).allclose(x.norm(dim=-1), rtol=1e-5)
    assert made.negative is None
    assert made.zero_point is None


def test_padding_has_no_part_in_a_gaussian_norm(x: Tensor) -> None:
    spec = TensorSpec(3, mapping="symmetric", codebook="gaussian", param_dtype="float32")
    padded, alone = quantize(x[0, 0, :8], spec, torch.arange(8) < 6), quantize(x[0, 0, :6], spec)
    assert torch.equal(padded.scale, alone.scale)
    assert torch.equal(padded.codes[:6], alone.codes)


def test_turboquant_values_have_a_range_per_token(x: Tensor) -> None:
    expected = [[rtn(row, 3) for row in head] for head in x[0].tolist()]
    assert_decodes(x, text("turboquant").value, torch.tensor([expected], dtype=x.dtype))


def deviation(row: list[float]) -> float:
    mean = sum(row) / len(row)
    return math.sqrt(sum((v - mean) ** 2 for v in row) / (len(row) - 1))


def balance(rows: list[list[float]]) -> list[float]:
    """KVarN's factors of columns, of the round that leaves the least imbalance."""
    size = (len(rows), len(rows[0]))
    logs = [[0.0] * size[1], [0.0] * size[0]]

    def current() -> list[list[float]]:
        columns, of_rows = ([math.exp(v) for v in log] for log in logs)
        return [[v / c / r for v, c in zip(row, columns, strict=True)]
                for row, r in zip(rows, of_rows, strict=True)]  # fmt: skip

    def deviations(which: int) -> list[float]:
        now = current()
        return [deviation(list(line)) for line in (zip(*now, strict=True) if not which else now)]

    def imbalance() -> float:
        return sum(max(d) / max(min(d), 1e-8) for d in (deviations(0), deviations(1)))

    least, best = imbalance(), [1.0] * size[1]
    for _ in range(16):
        for which in (0, 1):
            steps = [math.log(min(max(d, 1e-3), 1e3)) for d in deviations(which)]
            logs[which] = [
                min(max(v + s, -0.3), 10.0) for v, s in zip(logs[which], steps, strict=True)
            ]
        if (now := imbalance()) <= least:
            least, best = now, [math.exp(v) for v in logs[0]]
    return best


@pytest.mark.parametrize("which", ["key", "value"])
def test_kvarn_balances_rotated_tiles_of_128_tokens(x: Tensor, which: str) -> None:
    turned, expected = x[:, :1] @ hadamard(D) * 3, torch.empty_like(x[:, :1])
    bits = {"key": 4, "value": 2}[which]
    for start in range(0, TOKENS, 128):
        tile = turned[0, 0, start : start + 128]
        rows = (tile.T if which == "key" else tile).tolist()
        factors = balance(rows)
        even = [[v / f for v, f in zip(row, factors, strict=True)] for row in rows]
        decoded = torch.tensor([rtn(row, bits) for row in even]) * torch.tensor(factors)
        expected[0, 0, start : start + 128] = decoded.T if which == "key" else decoded
    assert max(factors) > 1.2 * min(factors)  # else the tile was balanced before
    assert_decodes(x[:, :1] * 3, getattr(text("kvarn"), which), expected @ hadamard(D))


def test_kvarn_keeps_the_first_tile_and_packs_whole_ones() -> None:
    spec = duotone.scheme("kvarn")
    assert (spec.sink, spec.recent, spec.flush_tokens) == (128, 0, 128)
    assert spec.nominal_bits(8) == 3


def by_clipped_token(
    x: Tensor, which: str, decoded: Callable[[list[float]], list[float]]
) -> Tensor:
    """Apply `decoded` to each rotated token, whose largest numbers are clipped by rank."""
    turned, share = x @ hadamard(D), {"key": 0.96, "value": 0.92}[which]
    expected = torch.empty_like(x)
    for h in range(HEADS):
        for t in range(TOKENS):
            row = turned[0, h, t].tolist()
            bound = sorted(map(abs, row))[int(share * D)]
            expected[0, h, t] = torch.tensor(decoded([min(max(v, -bound), bound) for v in row]))
    return expected @ hadamard(D)


@pytest.mark.parametrize("which", ["key", "value"])
def test_oscar_clips_rotated_tokens_by_rank(x: Tensor, which: str) -> None:
    expected = by_clipped_token(x, which, lambda row: rtn(row, 2))
    assert_decodes(x, getattr(text("oscar-rotation"), which), expected)


@pytest.mark.parametrize("which", ["key", "value"])
def test_oscars_lloyd_steps_follow_the_deviation(x: Tensor, which: str) -> None:
    edges = (-0.9810652732849121, 0.0, 0.9810652732849121)

    def decoded(row: list[float]) -> list[float]:
        mean = sum(row) / D
        deviation = math.sqrt(sum((v - mean) ** 2 for v in row) / D)
        scale = 2 * 1.5095585584640503 / 3 * 1.16 * deviation
        zero = 1.5 - mean / scale
        codes = [sum((v - mean) / deviation >= edge for edge in edges) for v in row]
        return [(code - zero) * scale for code in codes]

    spec = getattr(text("oscar-rotation", lloyd=True), which)
    assert_decodes(x, spec, by_clipped_token(x, which, decoded))


def test_oscar_takes_the_rotations_of_a_file(tmp_path) -> None:
    turns = torch.linalg.qr(torch.randn(2, 3, HEADS, D, D)).Q
    file = tmp_path / "rotations.safetensors"
    Bases(*turns, {}).save(file)
    spec = duotone.scheme("oscar-rotation", file=str(file))
    assert spec.at_layer(2).text.value.transform == f"klt:{file}#2.value"
    assert spec.at_layer(1).text.key.clip == 0.96


@pytest.mark.parametrize("which", ["key", "value"])
def test_oscars_tokens_have_norm_one_and_whole_zero_points(x: Tensor, which: str) -> None:
    turned = x @ hadamard(D)
    norms = turned.square().sum((1, 3)).sqrt()[0].tolist()
    even = turned[0] / torch.tensor(norms)[:, None] if which == "key" else turned[0]
    expected = torch.empty_like(even)
    for h in range(HEADS):
        lines = (even[h].T if which == "key" else even[h]).tolist()
        made = []
        for line in lines:
            row = []
            for i in range(0, len(line), 32):
                group = line[i : i + 32]
                scale = (max(group) - min(group)) / 3
                zero = round(-min(group) / scale)
                codes = [min(max(rounded(v / scale) + zero, 0), 3) for v in group]
                row += [(code - zero) * scale for code in codes]
            made.append(row)
        decoded = torch.tensor(made)
        expected[h] = decoded.T if which == "key" else decoded
    if which == "key":
        expected = expected * torch.tensor(norms)[:, None]
    spec = getattr(text("oscar-scaling"), which)
    assert_decodes(x, spec, (expected @ hadamard(D))[None])
    # One norm for all heads.
    assert which == "value" or packed(x, spec).factor.shape == (1, 1, TOKENS, 1)


@pytest.mark.parametrize(("ties", "codes"), [("up", [1, 2, 3]), ("even", [0, 2, 2])])
def test_a_middle_goes_up_or_to_the_even_code(ties: str, codes: list[int]) -> None:
    x = torch.tensor([[0.0, 3.0, 0.5, 1.5, 2.5]])
    for fields in ({}, {"classes": ((2, 1.0),), "along": "tokens"}):
        spec = TensorSpec(2, **{"along": "channels", "ties": ties, **fields})
        made = quantize(x.T if spec.classes else x, spec).codes
        assert made.flatten()[2:].tolist() == codes
    signs = quantize(x - 1.5, TensorSpec(1, "channels", mapping="symmetric", ties=ties))
    assert signs.codes.flatten().tolist() == [1, 1, 1, 0, 1]
    half = quantize(
        torch.tensor([[2.0, 1.0]]), TensorSpec(1, "channels", mapping="symmetric", ties=ties)
    )
    assert half.codes.flatten().tolist() == [1, {"up": 1, "even": 0}[ties]]


def test_released_windows_drain_and_round_to_even() -> None:
    for name in ("kivi", "asymkv", "xquant", "oscar-scaling"):
        ours, theirs = duotone.scheme(name), duotone.scheme(name, released=True)
        assert (ours.recent, ours.flush_tokens) == (128, 32)
        assert (theirs.recent, theirs.flush_tokens) == (0, 128)
        assert {tensor.ties for tensor in theirs.tensors} == {"even"}
        plain = [[t.replace(ties="up", lag=0) for t in spec.tensors] for spec in (ours, theirs)]
        assert plain[0] == plain[1] or name == "oscar-scaling"
        assert {t.lag for t in theirs.tensors} == ({0} if name == "oscar-scaling" else {0, 129})
    whole = duotone.scheme("calibquant", ties="even", channels=False).visual
    assert (whole.key.ties, whole.value.along, whole.value.heads) == ("even", "span", "all")
    assert duotone.scheme("calibquant", ties="even", channels=True).visual.value.shrink == 0.3


def test_on_visual_spans_a_scheme_keeps_its_quantizers() -> None:
    spec = duotone.scheme("asymkv", lk=2)
    visual = on_visual_spans(spec)
    assert (visual.visual, visual.text) == (spec.text, "dense")
    assert visual.at_layer(5).visual == spec.at_layer(5).text != spec.text
    with pytest.raises(ValueError, match="part of a quantized stream"):
        on_visual_spans(duotone.scheme("calibquant"))


BAD = {
    "clip must lie": {"clip": 0.0},
    "clip != 1 needs": {"clip": 0.9},
    "grid='zero' needs mapping": {"grid": "zero", "mapping": "symmetric"},
    "grid='zero' needs eta=0": {"grid": "zero", "eta": 0.1},
    "codebook='gaussian' needs": {"codebook": "gaussian"},
    "a codebook needs eta=0": {"codebook": "gaussian", "mapping": "symmetric", "eta": 0.1},
    "jensen needs": {"codebook": "gaussian", "mapping": "symmetric", "jensen": True},
    "factors='norm' needs": {"factors": "norm", "along": "channels"},
    "factors need parameters": {"factors": "norm", "param_dtype": "float8"},
    "tile needs": {"tile": 4},
    "ends='deviations' needs": {"ends": "deviations", "levels": "lloyd"},
    "ties='even' needs": {"ties": "even", "codebook": "gaussian", "mapping": "symmetric"},
    "heads='all' needs": {"heads": "all"},
}


@pytest.mark.parametrize("rule", BAD)
def test_choices_that_exclude_each_other_are_refused(rule: str) -> None:
    with pytest.raises(ValueError, match=rule.replace("(", r"\(")):
        TensorSpec(2, **BAD[rule])


def test_policies_refuse_what_has_no_meaning() -> None:
    with pytest.raises(ValueError, match="jensen must be False"):
        KVSpec(TensorSpec(2), TensorSpec(2, jensen=True))
    tiles = TensorSpec(2, "channels", factors="balanced")
    with pytest.raises(ValueError, match="needs a tile"):
        CacheSpec(visual="text", text=KVSpec(TensorSpec(2, group=8), tiles))
