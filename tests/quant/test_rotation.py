import pytest
import torch

from duotone.cache import pack_tensor
from duotone.cache.blocks import single_block
from duotone.quant import TensorSpec
from duotone.quant.rotation import hadamard, into_basis, out_of_basis


@pytest.mark.parametrize("channels", [1, 2, 16, 64, 80, 96, 128, 256])
def test_hadamard_is_orthogonal_and_its_own_inverse(channels: int) -> None:
    matrix = hadamard(channels)
    eye = torch.eye(channels, dtype=torch.float64)
    assert torch.allclose(matrix @ matrix, eye, atol=1e-12)
    assert torch.equal(matrix, matrix.T)
    size = channels & -channels
    assert (matrix != 0).sum() == channels * size
    assert torch.allclose(matrix[matrix != 0].abs(), torch.tensor(size**-0.5, dtype=torch.float64))


def test_rotation_of_nothing_is_nothing() -> None:
    x = torch.randn(1, 2, 3, 8)
    assert into_basis(x, None) is x
    assert torch.allclose(out_of_basis(into_basis(x, "hadamard"), "hadamard"), x, atol=1e-6)


def test_a_rotation_spreads_an_outlier_over_its_token() -> None:
    """Along channels one loud channel takes all levels of a group; a rotation prevents it."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 100, 64)
    x[..., 7] += 30
    spec, spans = TensorSpec(4, "channels"), single_block(torch.tensor([100]))
    errors = [
        (pack_tensor(x, spec.replace(transform=t), spans).dequantize() - x).square().mean()
        for t in (None, "hadamard")
    ]
    assert errors[1] < 0.2 * errors[0]
