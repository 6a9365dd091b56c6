"""Norms and MLPs that make the codes of the linears behind them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from duotone.weights.equivalences.hadamard import plan_hadamard
from duotone.weights.equivalences.norms import LayerNorm, RMSNorm
from duotone.weights.kernels.devices import has_kernels
from duotone.weights.modules.fused import CodedNorm, FusedMLP, activation_kind, agree, norm_kind
from duotone.weights.modules.modality import Modality
from duotone.weights.modules.packed_weight import PackedWeight
from duotone.weights.modules.quant_linear import QuantLinear

from linear_cases import DEVICE

needs_kernels = pytest.mark.skipif(not has_kernels(DEVICE), reason="needs triton")
CHANNELS = 24
MODALITY = Modality()


def quantized(outs=6, ins=CHANNELS, scales=(0.03,), plan=None, modality=MODALITY, **options):
    columns = ins if plan is None else plan.padded
    codes = torch.randint(-99, 99, (outs, columns), dtype=torch.int8, device=DEVICE)
    weight = PackedWeight(codes, 8, torch.rand(outs, device=DEVICE) / 99)
    kind = "dynamic" if scales is None else "static"
    return QuantLinear(
        weight,
        in_features=ins,
        activation=kind,
        scales=None if scales is None else torch.tensor(scales, device=DEVICE),
        modality=modality,
        plan=plan,
        **options,
    )


def rms_norm(dtype=torch.float32):
    return RMSNorm(1e-6, torch.linspace(0.5, 2, CHANNELS)).to(DEVICE, dtype)


def coded(norm, *readers):
    return CodedNorm(norm, readers, *norm_kind(norm, CHANNELS))


def states(dtype=torch.float32):
    return torch.randn(2, 5, CHANNELS, generator=torch.Generator().manual_seed(0)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scales", [(0.03,), (0.03, 0.01), None])
def test_readers_compute_what_they_do_by_themselves(scales, dtype):
    readers = [quantized(outs, scales=scales) for outs in (6, 4)]
    norm, x = rms_norm(dtype), states(dtype)
    fused = coded(norm, *readers)
    assert agree(readers)
    with MODALITY.rows(torch.rand(2, 5, device=DEVICE) < 0.5):
        codes = fused(x)
        assert codes.dtype == torch.int8
        assert codes.shape == x.shape
        for reader in readers:
            found, wanted = reader(codes), reader(norm(x))
            assert found.dtype == dtype
            assert torch.equal(found, wanted)


def test_codes_are_taken_once_and_from_nobody_else():
    reader = quantized()
    fused = coded(rms_norm(), reader)
    codes = fused(states())
    with pytest.raises(ValueError, match="which nobody handed over"):
        quantized()(codes)
    reader(codes)
    with pytest.raises(ValueError, match="which nobody handed over"):
        reader(codes)
    fused(states())
    with pytest.raises(ValueError, match="which nobody handed over"):
        reader(codes[:1])
    with pytest.raises(ValueError, match=r"got torch\.int64"):
        quantized()(codes.long())


def test_two_readers_of_different_scales_do_not_agree():
    first = quantized()
    others = {
        "another scale": quantized(scales=(0.02,)),
        "two scales": quantized(scales=(0.03, 0.03)),
        "dynamic": quantized(scales=None),
        "a transform": quantized(plan=plan_hadamard(CHANNELS)),
        "another model's mask": quantized(modality=Modality()),
        "no codes": nn.Linear(CHANNELS, 3),
    }
    assert agree([first, quantized(4)])
    assert [name for name, other in others.items() if agree([first, other])] == []
    assert not agree([])


def test_a_copy_hands_codes_to_its_own_readers():
    block = nn.ModuleDict({"linear": quantized()})
    block["norm"] = coded(rms_norm(), block["linear"])
    other = copy.deepcopy(block)
    codes = other["norm"](states())
    assert block["linear"].handed is None
    assert torch.equal(other["linear"](codes), block["linear"](block["norm"](states())))


def test_tensors_are_those_of_the_module_that_is_stood_for():
    norm = rms_norm()
    fused = coded(norm, quantized())
    assert fused.state_dict().keys() == {"weight"}
    fused.to(torch.bfloat16)
    assert norm.weight.dtype == torch.bfloat16
    fused.load_state_dict({"weight": torch.ones(CHANNELS)}, assign=True)
    assert fused.original.weight is fused.weight


NORMS = {
    "ours": (rms_norm(), "rms"),
    "ours without weight": (RMSNorm(1e-5), "rms"),
    "ours, centred": (LayerNorm(1e-5), "layer"),
    "torch's": (nn.LayerNorm(CHANNELS), "layer"),
    "16 bit": (nn.RMSNorm(CHANNELS, eps=1e-5).bfloat16(), "rms"),
}


@pytest.mark.parametrize(("norm", "kind"), NORMS.values(), ids=list(NORMS))
def test_norms_are_told_by_their_values(norm, kind):
    found = norm_kind(norm, CHANNELS)
    assert found == (kind, norm.eps)


class GemmaLike(nn.RMSNorm):
    """Multiplies by 1 + weight."""

    def forward(self, x):
        return super().forward(x) + F.rms_norm(x, x.shape[-1:], eps=self.eps)


def test_other_norms_are_not_fused():
    assert norm_kind(GemmaLike(CHANNELS, eps=1e-5), CHANNELS) is None
    assert norm_kind(nn.Identity(), CHANNELS) is None
    wrong = RMSNorm(1e-2)
    wrong.forward = RMSNorm(1e-6).forward
    assert norm_kind(wrong, CHANNELS) is None


@pytest.mark.parametrize(
    ("function", "kind"),
    [
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (nn.ReLU(), None),
        (nn.Mish(), None),
    ],
    ids=str,
)
def test_activations_are_told_by_their_values(function, kind):
    assert activation_kind(function) == kind


class MLP(nn.Module):
    """gated: two inputs, or a single one with both halves (packed)."""

    def __init__(self, gated, packed=False, act=None, **options):
        super().__init__()
        size = 2 * CHANNELS if packed else CHANNELS
        self.first = nn.Linear(CHANNELS, size, device=DEVICE)
        if gated and not packed:
            self.second = nn.Linear(CHANNELS, CHANNELS, device=DEVICE)
        self.act, self.down = act or nn.SiLU(), quantized(plan=plan_hadamard(CHANNELS), **options)
        self.gated, self.packed = gated, packed

    def forward(self, x):
        first = self.first(x)
        if self.packed:
            gate, up = first.chunk(2, -1)
            return self.down(up * self.act(gate))
        y = self.act(first)
        return self.down(y * self.second(x) if self.gated else y)

    def fused(self):
        inputs = ("first", "second") if self.gated and not self.packed else ("first",)
        return FusedMLP(self, inputs, "down", "act", activation_kind(self.act), self.gated)


SHAPES = {"gated": (True, False), "one product for both": (True, True), "plain": (False, False)}


@pytest.mark.parametrize(("gated", "packed"), SHAPES.values(), ids=list(SHAPES))
@torch.no_grad()
def test_an_mlp_computes_what_it_did(gated, packed):
    mlp = MLP(gated, packed)
    fused = mlp.fused()
    assert fused.state_dict().keys() == mlp.state_dict().keys()
    mlp.down.impl = "reference"
    assert torch.equal(fused(states()), mlp(states()))


@needs_kernels
@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("scales", [(0.03, 0.01), None])
def test_the_kernel_of_a_norm(kind, scales):
    reader = quantized(scales=scales)
    norm = rms_norm(torch.bfloat16) if kind == "rms" else nn.LayerNorm(CHANNELS, device=DEVICE)
    fused, x = coded(norm, reader), states(next(norm.parameters()).dtype)
    with MODALITY.rows(torch.arange(10, device=DEVICE).view(2, 5) % 3 == 0):
        wanted = fused.encode(x)
        reader.impl = "triton"
        found = fused.encode(x)
    torch.testing.assert_close(found.scale, wanted.scale, rtol=1e-2, atol=0)
    # The reference rounds the norm to 16 bit as the model does: by up to a code of 127, rarely.
    away = (found.codes.int() - wanted.codes.int()).abs()
    assert away.max() <= 1
    assert away.float().mean() < 0.12


@needs_kernels
@pytest.mark.parametrize("gated", [False, True])
@torch.no_grad()
def test_the_kernel_of_an_mlp(gated, monkeypatch):
    mlp = MLP(gated, act=nn.GELU())
    seen = []
    monkeypatch.setattr(mlp.down, "product", lambda given: seen.append(given) or given.codes)
    mlp(states())
    mlp.down.impl = "triton"
    mlp.fused()(states())
    away = (seen[0].codes.int() - seen[1].codes.int()).abs()
    assert away.max() <= 1
    assert away.float().mean() < 2e-2
    assert seen[0].codes.any()
