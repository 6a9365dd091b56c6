"""Class records dequantized by the kernel's own source on a CPU, bit for bit as torch does it."""

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

from duotone.attention.cuda.classes.layout import to_class_records
from duotone.attention.cuda.classes.stream import ClassStream
from duotone.attention.cuda.packing import dense
from duotone.attention.unpack import states_of
from duotone.cache import PackedTensor
from duotone.cache.pair import PackedPair
from duotone.cache.segments import PackedSegment
from duotone.quant import TensorSpec

from cases import CALIBRATED, CLASSES_KEY, CLASSES_VALUE, SMALL_TILES, UNITS

SPECS = unpacked.SPECS | {
    "whole columns": CALIBRATED,
    "half columns": UNITS,
    "one width of K": (TensorSpec(1), UNITS[1]),
    "one width of V": (UNITS[0], TensorSpec(2)),
    "in tiles": (CLASSES_KEY, CLASSES_VALUE),
    "in tiles, 8 bits": SMALL_TILES,
}
# Spans of two sequences: whole tiles, an odd rest, none.
RAGGED = [[0, 128, 211], [0, 65, 65]]


@pytest.fixture
def kernels(monkeypatch, folder) -> None:
    kernels_on_cpu(dense, monkeypatch, folder)


def segment(key: PackedTensor, value: PackedTensor, **given: object) -> PackedSegment:
    records = to_class_records(key, value)
    return segment_of(PackedPair(key.without_parts(), value.without_parts(), records), **given)


@needs_compiler
@pytest.mark.usefixtures("kernels")
@EACH_TYPE
@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_as_torch_has_them(name, head_dim, dtype) -> None:
    assert_unpacked(segment(*packed(SPECS[name], RAGGED, head_dim, dtype)))


@needs_compiler
@pytest.mark.usefixtures("kernels")
def test_a_wrong_record_is_noticed() -> None:
    right = segment(*packed(UNITS, RAGGED, 64, torch.bfloat16))
    wrong = replace(right.records, data=right.records.data ^ 1)
    with pytest.raises(AssertionError):
        assert_unpacked(replace(right, records=wrong), of=right)


@needs_compiler
@pytest.mark.usefixtures("kernels")
def test_a_stream_has_room_for_more_groups() -> None:
    """Groups of 64 tokens, each a span; a sequence has fewer."""
    specs = tuple(spec.replace(group=64) for spec in UNITS)
    spans = [[0, 64, 128, 192], [0, 64, 64, 64]]
    key, value = packed(specs, spans, 64, torch.bfloat16)
    whole = segment(key, value)
    stream = ClassStream.of(whole.records, value.blocks).widened(512)
    assert_unpacked(replace(whole, records=stream))


@needs_compiler
@pytest.mark.usefixtures("kernels")
def test_a_sequence_may_have_no_token() -> None:
    assert_unpacked(segment(*packed(UNITS, [[0, 0], [0, 130]], 64, torch.bfloat16)))


@needs_compiler
@pytest.mark.usefixtures("kernels")
def test_keys_are_multiplied_by_their_norm() -> None:
    norm = torch.rand(2, 2, 64) + 0.5
    normed = segment(*packed(UNITS, RAGGED, 64, torch.float32), key_norm=norm)
    for x, which in zip(states_of(normed), ("key", "value"), strict=True):
        for b, n in enumerate(normed.lengths.tolist()):
            assert torch.equal(x[b, :, :n], normed.states(which)[b, :, :n])
