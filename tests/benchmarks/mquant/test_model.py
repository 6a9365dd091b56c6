"""The benchmark of the whole model at a tiny size on a CPU, and the table made of it."""

import json

import pytest
import torch

from benchmarks.mquant import model as script
from benchmarks.mquant import random_model, speed_tables
from duotone.bench.timing import Clock
from duotone.weights.modules.quant_linear import QuantLinear


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(script, "RECIPES", (None, "mquant-w4a8"))
    monkeypatch.setattr(script, "REPLAYS", 1)


def test_it_runs_from_end_to_end(quick, tmp_path, monkeypatch):
    given = ["--tiny", "--layers", "1", "--tokens", "140", "--runs", "1", "--context", "9"]
    monkeypatch.setattr("sys.argv", ["model", "--out", str(tmp_path), *given])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    script.main()
    data = json.loads((tmp_path / "model.json").read_text())
    assert [(row["recipe"], row["fused"]) for row in data["rows"]] == [
        ("bf16", False),
        ("mquant-w4a8", True),
        ("mquant-w4a8", False),
    ]
    # Two norms and an MLP in the only layer of each stack.
    assert [row["fused_modules"] for row in data["rows"]] == [0, 6, 0]
    for row in data["rows"]:
        assert not [name for name in row if name.endswith("failed")]
        assert row["decode_ms"] > 0
        (prefill,) = row["prefill"]
        assert prefill["visual_tokens"] == 9
        assert 0 < prefill["vision_ms"] < prefill["ms"]
    assert data["rows"][1]["weight_bytes"] < data["rows"][0]["weight_bytes"]
    assert "| mquant-w4a8 | 6 |" in speed_tables.model_table([data])


def test_a_failure_is_part_of_the_row(quick, monkeypatch):
    def broken(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(script, "decode_ms", broken)
    monkeypatch.setattr(script, "prefill_rows", broken)
    row = script.measured(None, [140], Clock(), 1, 9)
    assert row["decode_failed"] == row["prefill_failed"] == "RuntimeError: out of memory"


@torch.inference_mode()
def test_sequences_of_a_decode_step_are_alike():
    config = random_model.config(tiny=True, layers=1)
    model = random_model.model(config, "mquant-w8a8", torch.device("cpu"))
    one, three = (random_model.decode_step(model, 9, 4, batch) for batch in (1, 3))
    for _ in range(2):
        wanted, found = one(), three()
        assert found.shape == (3, 1, model.config.get_text_config().vocab_size)
        torch.testing.assert_close(found, wanted.expand_as(found))


def test_a_random_model_is_that_of_its_recipe():
    config = random_model.config(tiny=True, layers=1)
    model = random_model.model(config, "mquant-w8a8", torch.device("cpu"))
    linears = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert len(linears) == 4 + 2 + 7
    behind = {n for n, m in linears.items() if m.plan is not None and m.weight_w0 is not None}
    assert {name.rpartition(".")[2] for name in behind} == {"fc2", "down_proj"}
    assert {len(m.scales) for n, m in linears.items() if "language" in n} == {2}
    assert not any(p.is_meta for p in model.parameters())
    with pytest.raises(ValueError, match="more than 128 tokens"):
        random_model.prompt(model, 128, 128)


def test_a_random_model_has_the_linears_of_its_rules():
    config = random_model.config(tiny=True, layers=1)
    linears = {}
    for recipe in (
        "mquant-vision8-down-per-token-w4a8",
        "mquant-head8-w4a8",
        "quarot-per-token-w8a8",
    ):
        model = random_model.model(config, recipe, torch.device("cpu"))
        linears[recipe] = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    mixed, head, quarot = linears.values()
    down = next(m for n, m in mixed.items() if n.endswith("down_proj"))
    assert (down.bits, down.activation) == (4, "dynamic")
    assert {m.bits for n, m in mixed.items() if "visual.blocks" in n} == {8}
    assert (head["lm_head"].bits, head["lm_head"].activation) == (8, "dynamic")
    assert {n.rpartition(".")[2] for n, m in quarot.items() if m.plan is not None} == {
        "o_proj",
        "proj",
        "fc2",
        "down_proj",
    }
