"""Layers that take in a prompt together, by kernels that pack."""

import pytest
import torch
from cuda_device import NEEDS_KERNELS
from together_cases import LAYERS, SPECS, assert_equal, assert_together

pytestmark = NEEDS_KERNELS


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SPECS)
def test_layers_have_the_bits_that_each_has_alone(
    name: str, dtype: torch.dtype, batch: int
) -> None:
    alone = assert_together(SPECS[name], batch, dtype)
    with pytest.raises(AssertionError):
        assert_equal(alone[0], alone[LAYERS - 1])
