"""Dense K and V of segments by kernels, against torch."""

import pytest
import torch

from duotone.attention import unpack
from duotone.cache.pair import PackedPair
from duotone.cache.segments import PackedSegment


def segment_of(pair: PackedPair, **given: object) -> PackedSegment:
    """All tokens of a pair."""
    records = pair.records
    return PackedSegment(pair.key, pair.value, pair.value.blocks.lengths, records=records, **given)


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are thought to be there."""
    monkeypatch.setattr(unpack, "has_kernels", lambda device: True)


def assert_unpacked(segment: PackedSegment, of: PackedSegment | None = None) -> None:
    """A kernel writes K and V as torch does, bit for bit. of: a segment with these tokens."""
    own = (segment if of is None else of).canonical()
    found = unpack.by_kernel(segment)
    assert found is not None
    for x, packed in zip(found, (own.key, own.value), strict=True):
        expected = packed.dequantize()
        assert (x.dtype, x.shape) == (expected.dtype, expected.shape)
        for b, n in enumerate(own.lengths.tolist()):
            assert torch.equal(x[b, :, :n], expected[b, :, :n])
