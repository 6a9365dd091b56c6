"""Cells without a measured time; `report/test_pages.py` has all others."""

from benchmarks.mquant import speed_tables as tables

from made_up_results import HEADER

CHAINS = ("static MSQ rows", "static unfused", "dynamic fused", "dynamic unfused")


def linear(**times: float | str) -> dict:
    chains = {f"chain {name}": 100.0 for name in CHAINS}
    us = {"bf16": 200.0, "chain bf16": 200.0, "w8a8": 100.0} | chains | times
    return {"linear": "qkv", "tokens": 8192, "out": 4608, "in": 3584, "us": us}


def result(*rows: dict, **more: object) -> dict:
    return {**HEADER, "copy_tb_per_s": 4.0, "rows": list(rows), **more}


def test_products_that_failed_say_so():
    some = result(linear(w8a8="ValueError: no"), {"failed": "RuntimeError: out of memory"})
    assert "| qkv (4,608 x 3,584) | 8,192 | 200.0 | failed |" in tables.prefill_table([some])
    assert "8,192" not in tables.decode_table([some])


def test_nothing_is_saved_or_added_up_where_a_time_is_missing():
    some = result(*[linear()] * 3, linear(**{"chain dynamic fused": "OutOfMemoryError"}))
    static = tables.static_table([some])
    assert "| 100.0 | 100.0 | 100.0 | 100.0 | +0.0 % | +0.0 % |" in static
    assert "| 100.0 | 100.0 |  | 100.0 |  |  |" in static
    assert "fused where it can be |  |  |" in tables.paper_table([some])


def test_models_that_failed_and_few_layers_are_named():
    base = {"recipe": "bf16", "fused": False, "weight_bytes": 16.5e9}
    timed = {"prefill": [{"tokens": 2048, "ms": 120.0, "vision_ms": 30.0}], "decode_ms": 6.0}
    rows = [base | timed, base | {"recipe": "dynamic-w4a8", "prefill": []}]
    text = tables.model_table([result(*rows, model="mini", layers=2, context=2048)])
    assert "| dynamic-w4a8 | none | 16.50 |  |  |  |" in text
    assert "2 layers of each stack" in text
