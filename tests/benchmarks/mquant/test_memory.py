import json
import sys

import pytest

from benchmarks.mquant import memory
from benchmarks.mquant.memory import linear_bytes, memory_7b, memory_rows, quantized_linears
from duotone.hf.weights.weight_maps import weight_map

from families import tiny_model


def test_bytes_of_a_linear():
    assert linear_bytes(10, 256, "bf16", split=False) == 5120
    assert linear_bytes(10, 300, "W4A16", split=False) == 1500 + 10 * 3 * 2
    assert linear_bytes(10, 300, "W4A8", split=False) == 1500 + 40 + 8
    # 4304 is padded to 4352; w0 stays in 16 bit.
    assert linear_bytes(10, 4304, "W4A8", split=True) == 5 * 4352 + 40 + 8 + 20


@pytest.mark.parametrize("name", ["internvl", "qwen3_vl", "llava_onevision"])
def test_every_parameter_counts_once(name):
    model = tiny_model(name)
    rows = {row["recipe"]: row for row in memory_rows(model, weight_map(model))}
    assert rows["bf16"]["total"] == 2 * sum(p.numel() for p in model.parameters())
    assert rows["W4A8"]["language"] < rows["bf16"]["language"] / 2
    parts = quantized_linears(weight_map(model))
    assert set(parts.values()) == {"vision", "language", "projector"}
    assert "lm_head" not in parts


def test_a_7b_shape_is_the_papers():
    rows = {row["recipe"]: row for row in memory_7b()}
    # Their Table 3 has 16.45 GB for bf16 and 6.50 GB, activations included, for W4A8.
    assert rows["bf16"]["total"] == pytest.approx(16.58e9, rel=1e-3)
    assert rows["W4A8"]["total"] == pytest.approx(5.79e9, rel=1e-3)
    head, vision = rows["W4A8, head W8A8"], rows["W4A8, vision W8A8"]
    assert head["head"] == pytest.approx(rows["bf16"]["head"] / 2, rel=2e-3)
    assert vision["vision"] == pytest.approx(rows["bf16"]["vision"] / 2, rel=0.01)
    assert {n: head[n] - rows["W4A8"][n] for n in head if n not in ("recipe", "head", "total")} == {
        n: 0 for n in rows["W4A8"] if n not in ("recipe", "head", "total")
    }


def test_main_writes_a_new_file(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "memory_7b", lambda: [{"a": 1}])
    monkeypatch.setattr(sys, "argv", ["memory", "--out", str(tmp_path)])
    memory.main()
    assert json.loads((tmp_path / "memory.json").read_text())["rows"] == [{"a": 1}]
    with pytest.raises(ValueError, match="never overwritten"):
        memory.main()
