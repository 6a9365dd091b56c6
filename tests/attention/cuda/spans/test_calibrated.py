"""Kept scores: what fits shared memory, and who must run together."""

import pytest
import torch

from duotone.attention.cuda.shared.geometry import MAX_CLUSTER, shared_bytes
from duotone.attention.cuda.spans import decode as span_decode
from duotone.attention.cuda.spans.calibrated import (
    RESERVED_BYTES,
    block_bytes,
    kept_geometry,
    static_bytes,
)
from duotone.attention.cuda.spans.layout import RecordFormat

SMS, CPU = 132, torch.device("cpu")
ONE_BIT = RecordFormat(128, 1, 1)


def geometry_of(form, group, heads, tokens, blocks=1, max_cluster=MAX_CLUSTER):
    warps, records = span_decode.warps_of(form, group), -(-tokens // form.tokens)
    most = span_decode.MAX_UNIT_TOKENS
    shared = shared_bytes(CPU)
    return kept_geometry(form, group, warps, heads, blocks, records, SMS, shared, most, max_cluster)


@pytest.mark.parametrize("group", [1, 4, 7, 16])
@pytest.mark.parametrize(
    "form", [ONE_BIT, RecordFormat(64, 2, 4), RecordFormat(256, 8, 1)], ids=str
)
@pytest.mark.parametrize(
    ("heads", "tokens", "blocks"), [(1, 63, 1), (64, 32768, 1), (512, 3328, 1), (24, 9000, 13)]
)
def test_scores_fit_and_parts_run_together(heads, tokens, blocks, form, group) -> None:
    at = geometry_of(form, group, heads, tokens, blocks)
    if at is None:
        return
    records, parts = -(-tokens // form.tokens), blocks * at.splits
    used = block_bytes(form, group, at, records)
    scores = -(-records // at.splits) * form.tokens * 4 * -(-group // 4) * 2
    assert used >= scores
    used += static_bytes(form, group, at.warps) + RESERVED_BYTES
    assert at.per_sm * used <= shared_bytes(CPU) + RESERVED_BYTES
    assert parts <= MAX_CLUSTER or heads * parts <= at.per_sm * SMS


@pytest.mark.parametrize(
    ("heads", "tokens", "parts"), [(256, 8192, 1), (64, 32768, 2), (512, 3328, 1), (8, 131072, 16)]
)
def test_the_tables_shapes_read_k_once(heads, tokens, parts) -> None:
    assert geometry_of(ONE_BIT, 4, heads, tokens).splits == parts


def test_what_does_not_fit_is_read_twice() -> None:
    assert geometry_of(ONE_BIT, 4, heads=512, tokens=200_000) is None
    assert geometry_of(ONE_BIT, 4, heads=64, tokens=32768, max_cluster=1) is not None
    assert geometry_of(ONE_BIT, 4, heads=512, tokens=32768, max_cluster=1) is None
