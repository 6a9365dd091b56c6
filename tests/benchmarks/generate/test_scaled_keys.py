import pytest
import torch

import duotone
from benchmarks.generate import scaled_keys
from duotone import QuantizedCache
from duotone.inference.random_models import random_model


def test_rows_differ_by_scales_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = random_model("tiny", torch.device("cpu"), torch.float32)
    spec = duotone.scheme("duotone")
    for always in (True, False):
        with scaled_keys.scaled(always):
            scales = QuantizedCache(model, spec).timeline.scales.each
        assert [w is not None for w in scales] == [always] * 2
    monkeypatch.setattr(scaled_keys, "NEW", 10)
    rows = scaled_keys.measure(model, 1, 40, rounds=1)
    assert [row["row"] for row in rows] == ["duotone@1", "duotone-whole@1"]
    assert all(isinstance(row[name], float) for row in rows for name in ("ms_plain", "ms_scaled"))
