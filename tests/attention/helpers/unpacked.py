"""Dense K and V of segments by kernels, against torch."""

from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

import duotone
from duotone.attention import unpack
from duotone.cache import BlockTable, PackedTensor, pack_tensor
from duotone.cache.pair import PackedPair
from duotone.cache.segments import PackedSegment
from duotone.quant import TensorSpec

from cases import SMALL
from cuda_on_cpu import missing, run_on_cpu

needs_compiler = pytest.mark.skipif(missing() is not None, reason=str(missing()))
# Every type of K and V, with heads of other sizes.
EACH_TYPE = pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, torch.float16), (80, torch.bfloat16), (128, torch.float32)]
)
Specs = tuple[TensorSpec, TensorSpec]
PRESET = duotone.scheme("duotone", bits=1).visual
# Specs of K and V that any kernel of spans reads.
SPECS: dict[str, Specs] = {
    "preset": (PRESET.key, PRESET.value),
    "8 bits": SMALL,
    "rotated": tuple(spec.replace(transform="hadamard") for spec in SMALL),
}


def packed(
    specs: Specs, offsets: Sequence[Sequence[int]], head_dim: int, dtype: torch.dtype
) -> tuple[PackedTensor, PackedTensor]:
    """K and V of two heads, with channels of other sizes. offsets: of each sequence's spans."""
    torch.manual_seed(0)
    blocks = BlockTable(torch.tensor(offsets))
    x = torch.randn(2, len(offsets), 2, blocks.tokens, head_dim) * torch.rand(head_dim)
    return tuple(pack_tensor(t.to(dtype), spec, blocks) for t, spec in zip(x, specs, strict=True))


def kernels_on_cpu(module: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: object) -> None:
    """Let a module's kernel run on the CPU, and where a GPU is asked for."""
    run_on_cpu(module, monkeypatch, folder)
    as_on_a_gpu(monkeypatch)


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
