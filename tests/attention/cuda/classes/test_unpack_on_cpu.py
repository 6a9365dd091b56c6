"""Class records dequantized by the kernel's own source on a CPU, bit for bit as torch does it."""

from dataclasses import replace

import pytest
import torch

import duotone
from duotone.attention.cuda.classes import layout, unpack
from duotone.attention.cuda.classes.format import ClassFormat
from duotone.attention.cuda.classes.layout import to_class_records
from duotone.attention.cuda.classes.stream import ClassStream
from duotone.attention.refused import RefusedError
from duotone.cache import BlockTable, PackedTensor, pack_tensor
from duotone.cache.segments import PackedSegment
from duotone.quant import TensorSpec

from cases import CALIBRATED, CLASSES_KEY, CLASSES_VALUE, SMALL, SMALL_TILES, UNITS
from cuda_on_cpu import missing, run_on_cpu

needs_compiler = pytest.mark.skipif(missing() is not None, reason=str(missing()))
PRESET = duotone.scheme("duotone", bits=1).visual
SPECS = {
    "preset": (PRESET.key, PRESET.value),
    "whole columns": CALIBRATED,
    "half columns": UNITS,
    "8 bits": SMALL,
    "rotated": tuple(spec.replace(transform="hadamard") for spec in SMALL),
    "one width of K": (TensorSpec(1), UNITS[1]),
    "one width of V": (UNITS[0], TensorSpec(2)),
    "in tiles": (CLASSES_KEY, CLASSES_VALUE),
    "in tiles, 8 bits": SMALL_TILES,
}
# Spans of two sequences: whole tiles, an odd rest, none.
RAGGED = [[0, 128, 211], [0, 65, 65]]


def packed(specs, offsets, head_dim, dtype) -> tuple[PackedTensor, PackedTensor]:
    torch.manual_seed(0)
    blocks = BlockTable(torch.tensor(offsets))
    x = torch.randn(2, len(offsets), 2, blocks.tokens, head_dim) * torch.rand(head_dim)
    return tuple(pack_tensor(t.to(dtype), spec, blocks) for t, spec in zip(x, specs, strict=True))


@pytest.fixture
def kernels(monkeypatch, folder) -> None:
    run_on_cpu(unpack, monkeypatch, folder)
    monkeypatch.setattr(layout, "has_kernels", lambda device: True)


def assert_equal_to_torch(records, key: PackedTensor, value: PackedTensor) -> None:
    found = records.dequantized(key.without_parts(), value.without_parts())
    for x, want in zip(found, (key, value), strict=True):
        assert x.dtype == want.dtype
        for b, n in enumerate(want.blocks.lengths.tolist()):
            assert torch.equal(x[b, :, :n], want.dequantize()[b, :, :n])


@needs_compiler
@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.float16), (80, torch.bfloat16), (128, torch.float32)]
)
@pytest.mark.parametrize("name", SPECS)
def test_tokens_are_as_torch_has_them(name, head_dim, dtype) -> None:
    key, value = packed(SPECS[name], RAGGED, head_dim, dtype)
    records = to_class_records(key, value)
    assert_equal_to_torch(records, key, value)
    flipped = replace(records, data=records.data ^ 1)
    with pytest.raises(AssertionError):
        assert_equal_to_torch(flipped, key, value)


@needs_compiler
@pytest.mark.usefixtures("kernels")
def test_a_stream_has_room_for_more_groups() -> None:
    """Groups of 64 tokens, each a span; a sequence has fewer."""
    specs = tuple(spec.replace(group=64) for spec in UNITS)
    spans = [[0, 64, 128, 192], [0, 64, 64, 64]]
    key, value = packed(specs, spans, 64, torch.bfloat16)
    records = ClassStream.of(to_class_records(key, value), value.blocks).widened(512)
    assert_equal_to_torch(records, key, value)


@needs_compiler
@pytest.mark.usefixtures("kernels")
def test_a_sequence_may_have_no_token() -> None:
    key, value = packed(UNITS, [[0, 0], [0, 130]], 64, torch.bfloat16)
    assert_equal_to_torch(to_class_records(key, value), key, value)


@needs_compiler
@pytest.mark.usefixtures("kernels")
def test_a_segment_multiplies_keys_by_their_norm() -> None:
    key, value = packed(UNITS, RAGGED, 64, torch.float32)
    norm = torch.rand(2, 2, 64) + 0.5
    segment = PackedSegment(
        key, value, value.blocks.lengths, key_norm=norm, records=to_class_records(key, value)
    )
    for x, which in zip(segment.both_states(), ("key", "value"), strict=True):
        for b, n in enumerate(value.blocks.lengths.tolist()):
            assert torch.equal(x[b, :, :n], segment.states(which)[b, :, :n])


def test_what_the_kernel_does_not_write_is_refused() -> None:
    form = ClassFormat.of(*UNITS, 64)
    unpack.check(form, torch.float16)
    with pytest.raises(RefusedError, match="float64"):
        unpack.check(form, torch.float64)
    with pytest.raises(RefusedError, match="even head_dim"):
        unpack.check(replace(form, head_dim=65), torch.float16)
