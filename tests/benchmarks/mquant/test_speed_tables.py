"""Tables of made-up times of the linear kernels."""

import copy

import pytest

from benchmarks.mquant import speed_tables as tables

SHAPES = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}
CHAINS = {
    "chain bf16": 220.0,
    "chain static MSQ rows": 110.0,
    "chain w4a8 static MSQ rows": 200.0,
    "chain static unfused": 120.0,
    "chain dynamic fused": 110.0,
    "chain dynamic unfused": 150.0,
}


def linear(name: str, tokens: int, times: dict[str, float | str]) -> dict:
    outs, ins = SHAPES[name]
    return {"linear": name, "tokens": tokens, "out": outs, "in": ins, "us": times}


@pytest.fixture
def result() -> dict:
    many = {"bf16": 200.0, "w8a8": 100.0, "w4a8 fused": "ValueError: no"} | CHAINS
    few = {"bf16": 40.0, "w8a8": 20.0, "w4a8": 10.0}
    rows = [linear(name, 8192, dict(many)) for name in SHAPES]
    rows += [linear("down", 1, few), linear("down", 16, few | {"w4a8 g128": 16.0})]
    rows.append({"failed": "RuntimeError: out of memory"})
    return {
        "schema": "duotone.mquant.speed/1",
        "created": "2026-11-22T12:00:00+00:00",
        "commit": "0123456789abcdef",
        "versions": {"torch": "2.11.0"},
        "device": "NVIDIA H200",
        "copy_tb_per_s": 4.0,
        "rows": rows,
    }


def test_products_show_times_and_speedups(result):
    text = tables.prefill_table([result])
    assert "| linear | tokens | bf16, us | w8a8 | w4a8 fused |" in text
    assert "| qkv (4,608 x 3,584) | 8,192 | 200.0 | 100.0 (2.00x) | failed |" in text
    assert "copy 4.00 TB/s; NVIDIA H200" in text
    decode = tables.decode_table([result])
    assert "| w4a8 | w4a8 g128 |\n" in decode
    assert "| down (3,584 x 18,944) | 1 | 40.0 | 20.0 (2.00x) | 10.0 (4.00x) |  |" in decode
    assert "| 16 | 40.0 | 20.0 (2.00x) | 10.0 (4.00x) | 16.0 (2.50x) |" in decode
    assert "8,192" not in decode


def test_static_saves_less_once_fused(result):
    text = tables.static_table([result])
    assert "| 110.0 | 120.0 | 110.0 | 150.0 | +20.0 % | +0.0 % |" in text
    result["rows"][0]["us"]["chain dynamic fused"] = "OutOfMemoryError"
    assert "| 110.0 | 120.0 |  | 150.0 |  |  |" in tables.static_table([result])


def test_the_papers_numbers_stand_beside_ours(result):
    text = tables.paper_table([result])
    assert "| BF16 | 1.690 (1.00x) | 0.0246 (1.00x) |" in text
    assert "| W4A8 MSQ | 1.085 (1.56x) | 0.0224 (1.10x) |" in text
    assert "RTX 6000 Ada" in text
    assert "| W4A8 MSQ + AIFS | 1.017 (1.66x) |  |" in text
    timed = copy.deepcopy(result)
    for row in timed["rows"]:
        if "us" in row:
            row["us"]["chain w4a8 static AIFS"] = row["us"].get("chain w4a8 static MSQ rows")
    again = tables.paper_table([timed])
    assert "| W4A8 MSQ + AIFS | 1.017 (1.66x) | 0.0224 (1.10x) |" in again
    missing = copy.deepcopy(result)
    del missing["rows"][0]["us"]["chain w4a8 static MSQ rows"]
    assert "| W4A8 MSQ | 1.085 (1.56x) |  |" in tables.paper_table([missing])


def whole(recipe, fused, ms, **more):
    prefill = [{"tokens": 2048, "visual_tokens": 1849, "ms": ms, "vision_ms": ms / 4}]
    common = {"recipe": recipe, "fused": fused, "fused_modules": 180 * fused}
    return {**common, "weight_bytes": 16.5e9, "prefill": prefill, **more}


def test_whole_models_are_compared_with_16_bit(result):
    rows = [
        whole("bf16", False, 120.0, decode_ms=6.0),
        whole("mquant-w4a8", True, 80.0, decode_ms=3.0),
        whole("mquant-w4a8", False, 96.0, decode_failed="RuntimeError: no"),
        whole("dynamic-w4a8", False, 96.0) | {"prefill": [], "prefill_failed": "no"},
    ]
    given = {"model": "Qwen2-VL-7B", "layers": 2, "context": 2048, "rows": rows}
    text = tables.model_table([result | given])
    assert "| bf16 | none | 16.50 | 120.0 (1.00x) | 30.0 | 6.000 (1.00x) |" in text
    assert "| mquant-w4a8 | 180 | 16.50 | 80.0 (1.50x) | 20.0 | 3.000 (2.00x) |" in text
    assert "| mquant-w4a8 | none | 16.50 | 96.0 (1.25x) | 24.0 |  |" in text
    assert "| dynamic-w4a8 | none | 16.50 |  |  |  |" in text
    assert "840² 1.24x" in text
    assert "W4A8 MSQ + AIFS, GEMV 2.13x" in text
    assert "2 layers of each stack" in text
