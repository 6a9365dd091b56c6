"""`duotone bench generate --budget` on a GPU: the limit is real, and steps are replayed."""

from pathlib import Path

import pytest
import torch

from duotone.bench.budget import attempt, memory_limit, release
from duotone.bench.generate import Bench, Load, Subject
from duotone.bench.generate_budget import Answers, BudgetBench
from duotone.bench.generate_rows import CALIBRATED, Row
from duotone.calibrate.random_bases import random_bases
from duotone.inference.random_models import random_model, tiled_prompt

pytestmark = pytest.mark.gpu
CUDA, BUDGET = torch.device("cuda"), 200 * 10**6


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> BudgetBench:
    model = random_model("tiny", CUDA, torch.bfloat16)
    file: Path = tmp_path_factory.mktemp("bases") / "random.safetensors"

    def prompts(visual: int, text: int) -> tuple[dict, None]:
        return tiled_prompt("tiny", model, 1, visual // 16, text), None

    inputs, calibrated = prompts(320, 128)[0], lambda base: random_bases(model, file)
    subject = Subject("tiny", model, inputs, calibrated=calibrated)
    return BudgetBench(Bench(subject, Load(1, 448, 60)), prompts, Answers(320, new=60))


@pytest.mark.parametrize("name", ["plain", "duotone@1", "duotone-mixed@2", CALIBRATED])
def test_the_largest_batch_fits_and_is_replayed(bench: BudgetBench, name: str) -> None:
    row = bench.row(Row.parse(name), BUDGET)
    assert row.get("reason") is None
    assert row["notes"] == []
    assert 0.5 * BUDGET < row["peak_bytes"] <= BUDGET
    assert row["largest_batch"] >= row["batch"] > 1


def test_the_limit_is_real() -> None:
    def take(megabytes: int) -> dict:
        _ = torch.empty(megabytes << 20, dtype=torch.uint8, device=CUDA)
        return {}

    # Memory that other tests left to the allocator is within the limit.
    release()
    with memory_limit(CUDA, torch.cuda.memory_reserved(CUDA), 512 << 20):
        assert attempt(take, 400) == {}
        assert attempt(take, 600) is None
    assert attempt(take, 600) == {}
