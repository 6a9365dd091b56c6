"""Kernels that start early still see what the ones ahead wrote."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

import mquant_cases
import mquant_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("kind", ["w8a8", "w4a8"])
def test_a_step_is_the_same_with_and_without(
    kind: str, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mquant_cases, "LAYERS", 3)
    monkeypatch.setattr(mquant_cases, "VOCABULARY", 4096)
    torch.manual_seed(1)
    step = mquant_step.Step(kind, batch, overlap=False)
    wanted = step().clone()
    assert wanted.isfinite().all()
    step.overlap = True
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(30):
        found.zero_()
        graph.replay()
        assert torch.equal(found, wanted)
