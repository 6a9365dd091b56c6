"""Span records dequantized by the kernel's own source on a CPU, bit for bit as torch does it."""

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

from duotone.attention.cuda.packing import dense
from duotone.attention.cuda.spans.layout import WIDTHS
from duotone.attention.cuda.spans.stored import SpanLayout
from duotone.attention.unpack import by_kernel
from duotone.cache.pair import PackedPair
from duotone.cache.segments import PackedSegment
from duotone.quant import TensorSpec

LEVELS = TensorSpec(4, levels="lloyd", gain="fit", param_dtype="float8")
SPECS = {
    **{f"{bits} bits": (TensorSpec(bits), TensorSpec(bits)) for bits in WIDTHS},
    "K wider": (TensorSpec(3), TensorSpec(1)),
    "V wider": (TensorSpec(1), TensorSpec(8)),
    "parameters in 8 bits": (LEVELS, LEVELS.replace(bits=3)),
    "rotated": (LEVELS.replace(transform="hadamard"),) * 2,
    "groups": (TensorSpec(2, group=128),) * 2,
}
# Spans of two sequences: several records, an odd rest, none.
RAGGED = [[0, 640, 771], [0, 257, 257]]


@pytest.fixture
def kernels(monkeypatch, folder) -> None:
    kernels_on_cpu(dense, monkeypatch, folder)


def segment(name: str, offsets, head_dim: int, dtype: torch.dtype) -> PackedSegment:
    laid = PackedPair(*packed(SPECS[name], offsets, head_dim, dtype)).laid_out(SpanLayout())
    assert laid.records is not None
    return segment_of(laid)


@needs_compiler
@pytest.mark.usefixtures("kernels")
@EACH_TYPE
@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_as_torch_has_them(name, head_dim, dtype) -> None:
    assert_unpacked(segment(name, RAGGED, head_dim, dtype))


@needs_compiler
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("change", ["codes", "scale", "zero_point"])
def test_a_wrong_number_is_noticed(change: str) -> None:
    right = segment("K wider", RAGGED, 64, torch.bfloat16)
    if change == "codes":
        wrong = replace(right, records=replace(right.records, data=right.records.data ^ 1))
    else:
        parts = {change: getattr(right.value, change) + 1}
        wrong = replace(right, value=replace(right.value, **parts))
    with pytest.raises(AssertionError):
        assert_unpacked(wrong, of=right)


@needs_compiler
@pytest.mark.usefixtures("kernels")
def test_a_sequence_may_have_no_token() -> None:
    assert_unpacked(segment("2 bits", [[0, 0], [0, 530]], 64, torch.bfloat16))


def test_tensors_that_are_views_go_to_torch(monkeypatch) -> None:
    unpacked.as_on_a_gpu(monkeypatch)
    right = segment("2 bits", [[0, 600]], 64, torch.bfloat16)
    scale = right.key.scale.repeat_interleave(2, -1)[..., ::2]
    assert by_kernel(replace(right, key=replace(right.key, scale=scale))) is None
