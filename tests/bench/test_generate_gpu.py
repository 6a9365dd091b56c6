"""`duotone bench generate` on a GPU: what a CPU leaves empty."""

import pytest
import torch

from duotone.bench.generate import Bench, Load, Subject
from duotone.bench.generate_rows import STATIC, Row
from duotone.inference.random_models import random_model, random_prompt

pytestmark = [
    pytest.mark.gpu,
    # Of torch's compiler, about what it is asked for here.
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),
]
CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def bench() -> Bench:
    model = random_model("tiny", CUDA, torch.bfloat16)
    return Bench(Subject("tiny", model, random_prompt("tiny", model, 2, 200)), Load(2, 200, 32))


@pytest.mark.parametrize("name", ["plain", "duotone@1", "duotone@1, no graphs"])
def test_peaks_are_measured(bench: Bench, name: str) -> None:
    row = bench.row(Row.parse(name))
    assert row.get("reason") is None
    assert row["peak_bytes"] >= row["cache_bytes"] > 0
    assert (row.get("graph_bytes", 0) > 0) == (name == "duotone@1")


def test_the_static_row_compiles_and_leaves_nothing(bench: Bench) -> None:
    before = torch.cuda.memory_allocated()
    row = bench.row(Row.parse(STATIC))
    assert row.get("reason") is None
    assert row["notes"] == []
    assert not {"_compiled_call", "_cache"} & set(vars(bench.model))
    assert torch.cuda.memory_allocated() <= before + 2**20
