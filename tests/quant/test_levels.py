"""Levels without codes are those that quantization finds."""

import pytest
import torch

from duotone.quant import TensorSpec, quantize
from duotone.quant.affine import block_levels
from duotone.quant.ranges import nearest_code

CLASSES = ((4, 1 / 8), (1, 1 / 2))
SPECS = {
    "plain": TensorSpec(2, shrink=0.9),
    "eta": TensorSpec(2, eta=0.1),
    "lloyd": TensorSpec(1, levels="lloyd", gain=1.2),
    "classes": TensorSpec(classes=CLASSES),
    "classes, eta": TensorSpec(classes=CLASSES, eta=0.05),
    "8 bits": TensorSpec(3, param_dtype="float8"),
    "8 bits, classes": TensorSpec(
        levels="lloyd", gain="fit", classes=CLASSES, param_dtype="float8"
    ),
    "preset": TensorSpec(levels="lloyd", gain="fit", energy=1.0, classes=CLASSES),
}


def states(tokens: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 3, tokens, 16) * torch.linspace(0.5, 3, 16) + torch.randn(16)


@pytest.mark.parametrize("tokens", [1, 63, 100])
@pytest.mark.parametrize("name", SPECS)
def test_levels_decode_and_choose_as_quantization_does(name: str, tokens: int) -> None:
    x, spec = states(tokens), SPECS[name]
    mask = torch.ones(2, 3, tokens, dtype=torch.bool)
    mask[0, :, tokens // 2 + 1 :] = False
    levels, expected = block_levels(x, spec, mask), quantize(x, spec, mask)
    assert torch.equal(levels.scale, expected.scale[..., 0, :])
    assert torch.equal(levels.zero_point, expected.zero_point[..., 0, :])
    if spec.classes is None:
        assert levels.classes is None
    else:
        assert torch.equal(levels.classes, expected.classes[..., 0, :])
    chosen = (levels.chosen_scale, levels.chosen_zero)
    codes = nearest_code(x.mT, *(t.float()[..., None] for t in chosen), 4).mT
    top = widths(levels.classes, spec) - 1
    assert torch.equal(codes.minimum(top) * mask[..., None], expected.codes.float())


def widths(numbers: torch.Tensor | None, spec: TensorSpec) -> torch.Tensor:
    """Levels of every channel."""
    if numbers is None:
        return torch.tensor(2.0**spec.bits)
    bits = torch.tensor([*(b for b, _ in spec.classes), 0])[numbers.long()]
    return 2.0 ** bits[..., None, :]


def test_what_cannot_be_quantized_has_no_levels() -> None:
    x = states(10)
    x[0, 1, 3, 2] = float("nan")
    with pytest.raises(ValueError, match="only finite values"):
        block_levels(x, SPECS["preset"])
    with pytest.raises(ValueError, match="param_dtype"):
        block_levels(states(10) * 1e6, SPECS["plain"])
