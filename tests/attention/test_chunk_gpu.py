"""Chunks on a real GPU: also few queries attend to tokens that kernels dequantize."""

from dataclasses import replace

import pytest
import torch
from cuda_device import NEEDS_KERNELS

import duotone
from duotone.attention import attend, attend_chunk, chunk
from duotone.cache import Visibility
from duotone.cache.segments import Segment
from duotone.quant import TensorSpec

from cases import Case, build

pytestmark = NEEDS_KERNELS
PRESET = duotone.scheme("duotone", bits=1).background
CASES = [
    Case((700, 333), PRESET.key, PRESET.value, gqa=7, head_dim=128, spans=1, dense=(9, 0)),
    Case((162, 81), PRESET.key, PRESET.value, gqa=1, head_dim=64, spans=2, dense=(40, 33)),
    Case((96, 64), TensorSpec(2, group=32), TensorSpec(2, "channels", 32), gqa=4, dense=(30, 2)),
]


def masked(case: Case, queries: int) -> tuple[torch.Tensor, list[Segment]]:
    """Queries that see nearly all tokens, at random, and the first of all nothing."""
    one, kv = build(case)
    shape = (len(one), one.shape[1], queries, one.shape[3])
    query = torch.randn(shape, dtype=one.dtype, device=one.device)
    seen = []
    for segment in kv:
        mask = torch.rand(len(one), queries, segment.tokens, device=one.device) < 0.9
        mask[0, 0] = False
        seen.append(replace(segment, mask=mask))
    return query, seen


@pytest.mark.parametrize("queries", [2, 40, chunk.FEW_QUERIES + 1])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_equal_the_reference(case: Case, queries: int, monkeypatch) -> None:
    query, kv = masked(replace(case, dtype=torch.float32), queries)
    expected = attend(query.double(), [segment.canonical() for segment in kv], sm_scale=0.1)
    monkeypatch.delattr(chunk, "attend")
    seen = Visibility(kv[0].mask)
    for given in (None, seen, seen):
        found = attend_chunk(query, kv, sm_scale=0.1, seen=given)
        assert (found - expected).abs().max() < 2e-3 * expected.abs().max()
    assert not found[0, :, 0].any()
