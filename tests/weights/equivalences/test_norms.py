import pytest
import torch
from torch import nn

from duotone.weights.equivalences.norms import LayerNorm, RMSNorm, centring, fold_norm, norm_parts

from exactly import assert_same


def norm_of(kind, size):
    norm = kind(size, eps=1e-5).double()
    for p in norm.parameters():
        p.data.normal_()
    return norm


class OnePlus(nn.RMSNorm):
    """Multiplies by 1 + weight, and no word of its name says so."""

    def forward(self, x):
        return nn.functional.rms_norm(x, x.shape[-1:], 1 + self.weight, self.eps)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm, OnePlus])
@pytest.mark.parametrize(("copies", "bias"), [(1, True), (1, False), (4, True), (3, False)])
def test_a_linear_takes_the_norm_over(kind, copies, bias):
    norm, linear = norm_of(kind, 7), nn.Linear(7 * copies, 5, bias=bias).double()
    x = torch.randn(2, copies, 7).double()
    expected = linear(norm(x).flatten(1))
    parts = norm_parts(norm)
    fold_norm(parts, linear)
    assert_same(linear(parts.plain()(x).flatten(1)), expected)
    assert (linear.bias is not None) is (bias or kind is nn.LayerNorm)


def test_a_convolution_takes_it_over():
    norm, conv = norm_of(nn.LayerNorm, 6), nn.Conv2d(6, 5, 2, 2).double()
    x = torch.randn(1, 4, 4, 6).double()
    expected = conv(norm(x).permute(0, 3, 1, 2))
    fold_norm(norm_parts(norm), conv)
    assert_same(conv(LayerNorm(1e-5)(x).permute(0, 3, 1, 2)), expected)


def test_layer_norm_is_rms_norm_of_the_centred():
    norm, x = norm_of(nn.LayerNorm, 9), torch.randn(4, 9).double() + 3
    parts = norm_parts(norm)
    assert_same(parts.plain(centres=False)(x @ centring(9)), parts.plain()(x))
    with pytest.raises(AssertionError):
        assert_same(parts.plain(centres=False)(x), parts.plain()(x))


def test_bfloat16_is_summed_in_float32():
    x = torch.randn(3, 512).bfloat16()
    expected = RMSNorm(1e-6)(x.double()).bfloat16()
    assert RMSNorm(1e-6)(x).dtype == torch.bfloat16
    torch.testing.assert_close(RMSNorm(1e-6)(x), expected, rtol=2**-8, atol=0)


def test_other_modules_and_sizes_are_refused():
    class GemmaRMSNorm(nn.RMSNorm):
        """By the name of a known kind, and it is none."""

        def forward(self, x):
            return nn.functional.rms_norm(x, x.shape[-1:], self.weight.exp(), self.eps)

    class Conditioned(nn.LayerNorm):
        def forward(self, x, shift):
            return super().forward(x) + shift

    folded = nn.RMSNorm(3, eps=1e-6, elementwise_affine=False)
    wrong_eps = nn.RMSNorm(3, eps=1e-6)
    wrong_eps.variance_epsilon, wrong_eps.eps = 1e-6, 1e-3
    wrong_eps.forward = lambda x: nn.functional.rms_norm(x, (3,), wrong_eps.weight, 1e-6)
    others = (nn.Linear(3, 3), GemmaRMSNorm(3, eps=1e-6), Conditioned(3), folded, wrong_eps)
    for module in others:
        with pytest.raises(ValueError, match=r"by its weight or by 1 [+] weight; got"):
            norm_parts(module)
    with pytest.raises(ValueError, match="multiple of them; got 8 inputs"):
        fold_norm(norm_parts(nn.LayerNorm(3)), nn.Linear(8, 2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_norm_is_known_by_what_it_computes(dtype):
    made = {
        (False, 0.0): nn.RMSNorm(6, eps=1e-5),
        (False, 1.0): OnePlus(6, eps=1e-5),
        (True, 0.0): nn.LayerNorm(6, eps=1e-5),
    }
    for (centres, offset), norm in made.items():
        nn.init.normal_(norm.weight)
        parts = norm_parts(norm.to(dtype))
        assert (parts.centres, parts.offset) == (centres, offset)
        assert torch.equal(parts.weight, offset + norm.weight.double())


def test_a_norm_without_numbers_is_known_too():
    with torch.device("meta"):
        norm = nn.RMSNorm(6, eps=1e-5)
    parts = norm_parts(norm)
    assert (parts.centres, parts.offset, parts.weight.is_meta) == (False, 0.0, True)
