"""Packages that are not installed here: the layouts they are given, by stand-ins in plain torch."""

import sys
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from duotone.bench.baselines import BASELINES, FP8, UnavailableError
from duotone.bench.row_bench import compare, reference
from duotone.bench.rows import DenseRow
from duotone.bench.shapes import Shape

ROWS = {baseline.name: DenseRow(baseline) for baseline in BASELINES}


def attention(query, key, value, scale):
    """[b, h, n, d] each, in fp32."""
    parts = (x.float() for x in (query, key, value))
    return F.scaled_dot_product_attention(*parts, scale=scale, enable_gqa=True)


def flash_attn_with_kvcache(q, k_cache, v_cache, softmax_scale):
    """flash-attn's layout: [batch, tokens, heads, d]."""
    parts = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
    return attention(*parts, softmax_scale).transpose(1, 2).bfloat16()


class BatchDecodeWithPagedKVCacheWrapper:
    """FlashInfer's, with pages [pages, kv_heads, page_size, d]."""

    def __init__(self, workspace, layout, use_tensor_cores):
        assert (layout, workspace.dtype) == ("HND", torch.uint8)

    def plan(self, indptr, indices, last, q_heads, kv_heads, head_dim, page_size, **options):
        assert (last == page_size).all()
        self.pages = [indices[a:b].long() for a, b in pairwise(indptr)]
        self.scale = options["sm_scale"]
        self.types = options["q_data_type"], options["kv_data_type"]

    def run(self, query, stored):
        assert self.types == (query.dtype, stored[0].dtype)
        outs = []
        for row, pages in zip(query, self.pages, strict=True):
            key, value = (x.float()[pages].transpose(0, 1).flatten(1, 2)[None] for x in stored)
            outs.append(attention(row[None, :, None], key, value, self.scale)[0, :, 0])
        return torch.stack(outs).bfloat16()


@pytest.fixture
def installed(monkeypatch):
    for name in ("flash_attn", "flash_attn_interface", "flashinfer"):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.flash_attn_with_kvcache = flash_attn_with_kvcache
        module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
        monkeypatch.setitem(sys.modules, name, module)
    return ["flash-attn 2", "flash-attn 3", "flashinfer", "flash-attn 3 fp8", "flashinfer fp8"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "name", ["flash-attn 2", "flash-attn 3", "flashinfer", "flash-attn 3 fp8", "flashinfer fp8"]
)
def test_layouts(name):
    row, shape = ROWS[name], Shape(2, 6, 2, 48, 64)
    torch.manual_seed(0)
    problem = row.problem(shape, torch.device("cpu"))
    compare(row.call(problem)().reshape(problem.query.shape), reference(problem), row.tolerance)
    assert row.nbytes(problem).total == 2 * 2 * 2 * 48 * 64 * row.bits // 8


@pytest.mark.usefixtures("installed")
def test_flashinfer_takes_whole_pages_only():
    row = ROWS["flashinfer"]
    problem = row.problem(Shape(1, 2, 1, 50, 64), torch.device("cpu"))
    with pytest.raises(UnavailableError, match="whole pages"):
        row.call(problem)


def test_what_is_not_installed_says_so():
    problem = ROWS["flashinfer"].problem(Shape(1, 2, 1, 48, 64), torch.device("cpu"))
    for name in ("flash-attn 2", "flash-attn 3 fp8", "flashinfer fp8"):
        with pytest.raises(UnavailableError, match="is not installed"):
            ROWS[name].call(problem)


def test_only_fp8_rows_are_not_16_bit():
    assert {r.name for r in ROWS.values() if r.bits != 16} == {"flash-attn 3 fp8", "flashinfer fp8"}
    assert FP8.itemsize == 1
