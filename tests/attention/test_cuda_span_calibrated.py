"""Kept scores: what fits shared memory, who must run together, and that the kernel compiles."""

import ctypes

import pytest
import torch

from duotone.attention.cuda import runtime, span_decode
from duotone.attention.cuda.geometry import shared_bytes
from duotone.attention.cuda.layout import RecordFormat
from duotone.attention.cuda.span_calibrated import (
    MAX_CLUSTER,
    RESERVED_BYTES,
    SOURCE,
    block_bytes,
    kept_geometry,
)

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
    assert at.per_sm * (used + RESERVED_BYTES) <= shared_bytes(CPU) + RESERVED_BYTES
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


@pytest.mark.parametrize(("arch", "cluster"), [("sm_80", 1), ("sm_90", 1), ("sm_90", 4)])
@pytest.mark.parametrize(
    ("form", "group"), [(ONE_BIT, 4), (RecordFormat(80, 4, 2), 16), (RecordFormat(64, 8, 1), 7)]
)
def test_compiles(form, group, arch, cluster, tmp_path, monkeypatch) -> None:
    pytest.importorskip("cuda.core", reason="compiling CUDA sources needs cuda-core and NVRTC")
    monkeypatch.setenv("DUOTONE_CACHE", str(tmp_path))
    macros = {
        "CHANNELS": form.head_dim,
        "G": group,
        "WARPS": 8,
        "PER_SM": 1,
        "STAGES": form.stages,
        "OVERLAP": 1,
        "QUERY": 1,
        "OUT": 1,
        "PAGED": 0,
        "MERGE": 1,
        "ARGUMENTS_BYTES": ctypes.sizeof(span_decode.Arguments),
        **span_decode.macros_of(form, calibrate=True),
    }
    if cluster > 1:
        macros["CLUSTER"] = cluster
    assert runtime.compiled(SOURCE, arch, macros)[:4] == b"\x7fELF"
