"""Short spans dequantized by the kernel's own source on a CPU, bit for bit as torch does it."""

from dataclasses import replace

import pytest
import torch
import unpacked
from unpacked import (
    EACH_TYPE,
    assert_unpacked,
    kernels_on_cpu,
    needs_compiler,
    packed,
    segment_of,
)

from duotone.attention.cuda.short import unpack
from duotone.attention.refused import RefusedError
from duotone.cache.pair import PackedPair
from duotone.cache.segments import PackedSegment
from duotone.quant import TensorSpec

from cases import CALIBRATED, UNITS

SPECS = unpacked.SPECS | {
    "odd classes": CALIBRATED,
    "fp16": UNITS,
    "one width each": (TensorSpec(4, param_dtype="float8"), TensorSpec(1)),
}
# Spans of two sequences: of an odd length, of one token, none.
RAGGED = [[0, 21, 22, 49], [0, 13, 13, 13]]


def segment(name: str, offsets, head_dim: int, dtype: torch.dtype) -> PackedSegment:
    return segment_of(PackedPair(*packed(SPECS[name], offsets, head_dim, dtype)))


@pytest.fixture
def kernels(monkeypatch, folder) -> None:
    kernels_on_cpu(unpack, monkeypatch, folder)


@needs_compiler
@pytest.mark.usefixtures("kernels")
@EACH_TYPE
@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_as_torch_has_them(name, head_dim, dtype) -> None:
    assert_unpacked(segment(name, RAGGED, head_dim, dtype))


@needs_compiler
@pytest.mark.usefixtures("kernels")
def test_a_wrong_code_is_noticed() -> None:
    right = segment("fp16", RAGGED, 64, torch.bfloat16)
    wrong = replace(right, value=replace(right.value, codes=right.value.codes ^ 1))
    with pytest.raises(AssertionError):
        assert_unpacked(wrong, of=right)


def test_what_the_kernel_does_not_write_is_refused() -> None:
    right = segment("8 bits", RAGGED, 64, torch.bfloat16)
    unpack.check(right, torch.float16)
    with pytest.raises(RefusedError, match="float64"):
        unpack.check(right, torch.float64)
    turned = right.key.codes.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(RefusedError, match="contiguous"):
        unpack.check(replace(right, key=replace(right.key, codes=turned)), torch.float16)
