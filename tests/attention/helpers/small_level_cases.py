"""Levels to round to 8 bits, on a GPU and on the CPU."""

import torch

from duotone.attention.cuda.classes.format import Classes
from duotone.attention.cuda.classes.levels import SortedLevels
from duotone.cache import BlockTable
from duotone.quant import TensorSpec

from cases import SMALL, SMALL_TILES, UNITS

SPECS = {
    "calibrated": SMALL[0],
    "preset": SMALL_TILES[0],
    "units": UNITS[1].replace(param_dtype="float8"),
    "plain": TensorSpec(4, param_dtype="float8"),
}


def levels_of(spec: TensorSpec, head_dim: int, device: str = "cpu") -> SortedLevels:
    """Random levels of three sequences, some tiny, zero or of fp16's largest."""
    torch.manual_seed(0)
    coded = Classes.of(spec, head_dim).channels
    shape = (3, 2, 5)
    size = torch.logspace(-7, 4, 30, 10).view(*shape, 1)
    scale = torch.randn(*shape, coded).exp() * size
    zero = torch.randn(*shape, head_dim) * size * 3
    scale[0, 0, 0], zero[1, 0, 0], zero[1, 1, 1, ::2], scale[2, 0, 1, 0] = 0, 0, 0, -1
    parts = [x.clamp(-65504, 65504).half().to(device) for x in (scale, zero)]
    blocks = BlockTable(torch.arange(0, 600, 100).expand(3, -1).to(device))
    order = torch.arange(head_dim, device=device).expand(*shape, -1)
    return SortedLevels(blocks, order, parts[0], parts[1], *parts)
