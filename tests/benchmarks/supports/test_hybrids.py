"""`benchmarks.supports.hybrids` on a CPU, and its table."""

import pytest
import torch
import transformers

from benchmarks.supports import hybrids
from benchmarks.supports.tables import hybrids_table
from duotone.bench.generate_rows import Row
from duotone.inference.random_models import random_model_of


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    model_type, fields = hybrids.SHAPES["tiny"]
    config = transformers.AutoConfig.for_model(model_type, **fields)
    made = random_model_of(config, torch.device("cpu"), torch.float32)
    made.generation_config = type(made.generation_config)(pad_token_id=0)
    return made


def test_a_prompt_is_read_in_pieces_and_repeated(
    model: transformers.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrids, "PIECE", 64)
    rows = {
        name: list(hybrids.measure(model, Row.parse(name), 150, [1, 3], 24))
        for name in ("plain", "kivi@2")
    }
    for plain, ours in zip(*rows.values(), strict=True):
        assert ours["own_cache_bytes"] == plain["cache_bytes"] > ours["cache_bytes"]
        assert min(ours["ms_per_token"], plain["ms_per_token"], ours["read_s"]) > 0
    assert [row["batch"] for row in rows["plain"]] == [1, 3]
    # A tensor of 151 tokens has 24 more at the end of the first batch, 24 more of the second.
    assert rows["plain"][1]["cache_bytes"] > 3 * rows["plain"][0]["cache_bytes"]


def test_reading_in_pieces_changes_no_token(
    model: transformers.PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = torch.randint(5, 280, (1, 150), generator=torch.Generator().manual_seed(0))
    whole = hybrids._read(model, ids)
    monkeypatch.setattr(hybrids, "PIECE", 64)
    assert torch.equal(hybrids._read(model, ids).sequences, whole.sequences)


def test_the_table_says_why_a_number_is_missing() -> None:
    at = {"tokens": 4096, "batch": 16}
    rows = [
        {**at, "row": "plain", "failed": True, "reason": "OutOfMemoryError: of CUDA"},
        {**at, "row": "kivi@2", "ms_per_token": 9.5, "cache_bytes": 2e9},
        {**at, "row": "kivi@2", "ms_per_token": 8.5, "cache_bytes": 1e9, "batch": 1},
    ]
    stamped = {"device": "H200", "versions": {"torch": "2.11", "transformers": "5.17.0"}}
    table = hybrids_table([{"model": "m", "rows": rows, **stamped}])
    assert "| m | 4,096 | 16 | out of memory | 9.50 | out of memory | 2.00 |" in table
    assert "| m | 4,096 | 1 | not run | 8.50 | not run | 1.00 |" in table
    assert table.endswith("H200, torch 2.11, transformers 5.17.0.")
