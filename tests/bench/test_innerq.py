"""InnerQ's products: the Triton kernels in the interpreter (or on a GPU) against torch."""

from dataclasses import replace

import pytest
import torch

from duotone.bench import innerq
from duotone.bench.innerq import GROUPINGS, PRODUCTS, check_product, product_call, spec_of
from duotone.bench.problems import random_packed
from duotone.bench.timing import Deadline
from duotone.cache import PackedTensor, pack_tensor
from duotone.quant import TensorSpec

from fake_clock import FakeClock

pytest.importorskip("triton", reason="the products are Triton kernels")
from duotone.bench.innerq_kernels import TILES

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def case(product, grouping, tokens, head_dim=64, heads=3):
    torch.manual_seed(0)
    matrix = random_packed(1, heads, tokens, head_dim, spec_of(product, grouping), DEVICE)
    width = head_dim if product == "q K^T" else tokens
    return torch.randn(1, heads, 1, width, device=DEVICE, dtype=torch.float16), matrix


@pytest.mark.parametrize("tokens", [32, 100, 257])
@pytest.mark.parametrize("grouping", ["outer", "inner"])
@pytest.mark.parametrize("product", PRODUCTS)
def test_products_equal_torchs(product, grouping, tokens):
    vector, matrix = case(product, grouping, tokens)
    for tile in (TILES[0], TILES[2]):
        check_product(product, vector, matrix, product_call(product, vector, matrix, tile)())


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_wrong_product_is_noticed(product):
    vector, matrix = case(product, "inner", 100)
    out = product_call(product, vector, replace(matrix, codes=matrix.codes ^ 1), TILES[0])()
    with pytest.raises(ValueError, match="do not trust"):
        check_product(product, vector, matrix, out)
    with pytest.raises(ValueError, match="do not trust"):
        check_product(product, vector, matrix, torch.full_like(out, torch.nan))


def test_inner_is_along_the_summed_dimension():
    assert spec_of("q K^T", "inner") == spec_of("p V", "outer") == TensorSpec(2, "channels", 32)
    assert spec_of("p V", "inner") == spec_of("q K^T", "outer") == TensorSpec(2, "tokens", 32)


def test_both_groupings_read_the_same_bytes():
    used = set()
    for product in PRODUCTS:
        for grouping in GROUPINGS[1:]:
            _, matrix = case(product, grouping, 256)
            used.add((matrix.codes_bytes, matrix.params_bytes))
    assert used == {(3 * 256 * 16, 3 * 256 * 2 * 4)}


def table(clock, minutes=None, tokens=(64, 96), heads=1):
    deadline = Deadline(clock, minutes)
    return innerq.innerq_rows(clock, deadline, 3, lambda *_: None, tokens=tokens, heads=heads)


@pytest.fixture
def two_tiles(monkeypatch):
    monkeypatch.setattr("duotone.bench.innerq_kernels.TILES", TILES[:2])
    monkeypatch.setattr("duotone.bench.timing.MIN_ROTATED", 2)
    monkeypatch.setattr("duotone.bench.timing.ROTATED_BYTES", 1)


@pytest.fixture
def by_torch(monkeypatch):
    """No kernel, where only the course of events counts."""

    def call(product, vector, matrix, tile):
        packed = isinstance(matrix, PackedTensor)
        dense = replace(matrix, dtype=vector.dtype).dequantize() if packed else matrix
        return product_call(product, vector, dense, tile)

    monkeypatch.setattr(innerq, "product_call", call)


@pytest.mark.usefixtures("two_tiles")
def test_the_table_has_every_product_and_mapping():
    result = table(FakeClock())
    assert result["stopped"] is None
    assert len(result["products"]) == 2 * 2 * 3
    assert len(result["quantization"]) == 2 * 2 * 3
    for row in result["products"]:
        assert row["us"] == {"do_bench": 12.5, "clean": 10.0, "rotated": 10.0}
        assert row["less_time_than_outer"]["clean"] == 0
    dense, inner = (
        next(r for r in result["products"] if r["grouping"] == grouping and r["tokens"] == 96)
        for grouping in ("torch.matmul", "inner")
    )
    assert dense["bytes"] == 96 * 128 * 2
    assert inner["bytes"] == 96 * (32 + 4 * 4)
    assert set(result["tiles"]) == {f"{p}, {g}" for p in PRODUCTS for g in ("outer", "inner")}


@pytest.mark.usefixtures("two_tiles", "by_torch")
def test_sizes_that_come_too_late_are_missing():
    result = table(FakeClock(tick_s=40), minutes=1)
    assert {row["tokens"] for row in result["products"]} == {64}
    assert result["stopped"] == "the time was over before 96 tokens (--minutes)"


@pytest.mark.usefixtures("two_tiles", "by_torch")
def test_sizes_beyond_memory_leave_the_others(monkeypatch):
    def pack(states, spec, spans):
        if states.shape[2] == 96:
            raise torch.OutOfMemoryError
        return pack_tensor(states, spec, spans)

    monkeypatch.setattr(innerq, "pack_tensor", pack)
    result = table(FakeClock())
    assert {row["tokens"] for row in result["quantization"]} == {64}
    assert result["stopped"] == "out of memory at 96 tokens"


def test_saved_time_is_counted_as_the_paper_does():
    def row(grouping, us):
        return {"grouping": grouping, "us": dict.fromkeys(("do_bench", "clean", "rotated"), us)}

    rows = innerq._with_claims([row("torch.matmul", 100.0), row("outer", 20.0), row("inner", 15.0)])
    assert rows[2]["less_time_than_torch.matmul"]["clean"] == pytest.approx(0.85)
    assert rows[2]["less_time_than_outer"]["rotated"] == pytest.approx(0.25)
