"""Levels rounded to 8 bits on a GPU, byte for byte."""

import pytest
import torch
from cuda_device import NEEDS_KERNELS
from small_level_cases import SPECS, levels_of

from duotone.attention.cuda.classes.small_levels import stored_levels

pytestmark = NEEDS_KERNELS


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("name", SPECS)
def test_bytes_are_those_of_torch(name: str, head_dim: int) -> None:
    levels = levels_of(SPECS[name], head_dim, "cuda")
    found = stored_levels(levels, SPECS[name])
    for ours, theirs in zip(found, levels.parameters(SPECS[name]), strict=True):
        assert torch.equal(ours, theirs)
