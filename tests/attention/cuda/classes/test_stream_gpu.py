"""Streams of classes on a real GPU: packed by kernels, read from buffers that grow or are fixed."""

import pytest
import torch
from class_streams import SPECS, decode
from cuda_device import NEEDS_KERNELS

from duotone.attention.cuda.classes.pack import prepared
from duotone.attention.cuda.classes.stream import ClassLayout, ClassStream, of_spans
from duotone.cache.ledger import Piece
from duotone.cache.pair import Layouts, PackedPair
from duotone.cache.segments import PackedSegment

from pack_cases import dense_states, taken_anywhere

pytestmark = NEEDS_KERNELS
NAMES = ("lloyd", "small", "rotated")


@pytest.mark.parametrize("name", NAMES)
def test_bytes_are_those_of_torch_by_the_same_levels(name: str) -> None:
    torch.manual_seed(0)
    spec, offsets = SPECS[name], torch.tensor([[0, 256], [0, 128], [0, 0]], device="cuda")
    key, value = (dense_states((3, 2, 300, 64), torch.bfloat16, 0) for _ in range(2))
    piece = taken_anywhere(offsets, 300)
    pair = ClassLayout().pack(key, value, spec, piece)
    assert isinstance(pair.records, ClassStream)
    groups = Piece(piece.take, piece.spans.split(64), piece.join)
    work = prepared(key, value, of_spans(spec), groups)
    both = zip(
        (work.key_levels, work.value_levels), (work.key, work.value), (spec.key, spec.value),
        strict=True,
    )  # fmt: skip
    packed = (levels.packed(x, tensor) for levels, x, tensor in both)
    expected = PackedPair(*packed).laid_out(ClassLayout())
    assert isinstance(expected.records, ClassStream)
    for name, tensor in expected.records.tensors.items():
        real = slice(None) if name in ("data", "first", "tokens") else (0, slice(None), slice(4))
        assert torch.equal(pair.records.tensors[name][real], tensor[real]), name


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", NAMES)
def test_attention_is_near_the_reference(name: str, static: bool) -> None:
    laid, found = decode(name, Layouts(stream=ClassLayout()), static, "cuda", "cuda")
    _, expected = decode(name, Layouts(stream=ClassLayout()), static, "cuda", "reference")
    (segment,) = (x for x in laid if isinstance(x, PackedSegment))
    assert isinstance(segment.records, ClassStream)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-2, atol=4e-3)
