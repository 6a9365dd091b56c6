import pytest
import torch

from duotone.attention.layout import LAYOUTS, from_layout, to_layout
from duotone.cache import pack_tensor
from duotone.cache.blocks import single_block
from duotone.quant import TensorSpec


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_every_layout_has_an_exact_inverse(name: str, bits: int) -> None:
    torch.manual_seed(0)
    spans = single_block(torch.tensor([37, 100]))
    packed = pack_tensor(torch.randn(2, 3, 100, 80), TensorSpec(bits), spans)
    back = from_layout(to_layout(packed, name))
    assert torch.equal(back.codes, packed.codes)
    assert torch.equal(back.dequantize(), packed.dequantize())
    assert back.spec == packed.spec


def test_unknown_layouts_are_refused() -> None:
    spans = single_block(torch.tensor([3]))
    packed = pack_tensor(torch.randn(1, 1, 3, 8), TensorSpec(), spans)
    with pytest.raises(ValueError, match=r"layout must be one of .*'canonical'.*got 'x'"):
        to_layout(packed, "x")
