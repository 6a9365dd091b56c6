"""`narrow.cuh` on a CPU: every number of 16 bits, and many of 32, as torch rounds them to e4m3."""

import ctypes

import pytest
import torch

from duotone.attention.cuda.dense import window_append
from duotone.cache.dense_dtype import FP8, kept_as

from cuda_on_cpu import missing
from units_on_cpu import compiled

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
KERNEL = """
struct Arguments { const char* from; char* to; };
#include "packing/narrow.cuh"
void narrow_row(const Arguments& at) {
  ((uint4*)at.to)[blockIdx.x] = load_vector(at.from, blockIdx.x);
}
"""
HALVES = {"cvt.f32.f16": "y[0] = half_to_float_here(x), y[1] = half_to_float_here(x >> 16);"}


class Arguments(ctypes.Structure):
    """`Arguments` of the kernel above."""

    _fields_ = (("source", ctypes.c_void_p), ("target", ctypes.c_void_p))


def patterns(dtype: torch.dtype) -> torch.Tensor:
    """Every number of 16 bits; of 32, those at the ends of what rounds to the same, and others."""
    if dtype.itemsize == 2:
        return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    halves = patterns(torch.bfloat16).float().view(torch.int32)
    near = torch.cat([halves + n for n in (-1, 0, 1, 1 << 15)]).view(dtype)
    return torch.cat([near, torch.randn(1 << 14) * 100, torch.tensor([1e9, -torch.inf] * 8)])


@pytest.mark.parametrize("dtype", window_append.NARROWED, ids=str)
def test_numbers_are_rounded_as_torch_does(dtype, tmp_path) -> None:
    x = patterns(dtype)
    out = torch.empty(len(x), dtype=torch.uint8)
    given = Arguments(x.data_ptr(), out.data_ptr())
    macros = {"NARROW": window_append.NARROWED[dtype], "LATE": 0, "__CUDA_ARCH__": 800}
    compiled("narrow_row", macros, tmp_path, KERNEL, HALVES)(given, len(x) // 16, 32)
    expected = kept_as(x, FP8)
    assert len(x) % 16 == 0
    real = ~expected.float().isnan()
    assert not real.all()
    assert torch.equal(out.view(FP8).float().isnan(), ~real)
    assert torch.equal(out[real], expected.view(torch.uint8)[real])
