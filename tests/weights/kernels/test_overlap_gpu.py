"""Kernels that start early still see what the ones ahead wrote."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from benchmarks.mquant import random_model
from duotone.hf.weights.fusion import is_fused
from duotone.weights.kernels.triton.overlap import overlap_if

pytestmark = pytest.mark.gpu
CONTEXT, REPLAYS = 512, 30


def replayed(made: torch.nn.Module, batch: int, overlap: bool) -> list[Tensor]:
    """Logits of a captured step, replay after replay, each of which adds a token to the cache."""
    with overlap_if(overlap):
        step = random_model.decode_step(made, CONTEXT, REPLAYS + 2, batch)
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
    found = []
    for _ in range(REPLAYS):
        logits.zero_()
        graph.replay()
        found.append(logits.clone())
    return found


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("recipe", ["mquant-w8a8", "mquant-w4a8"])
@torch.inference_mode()
def test_a_step_is_the_same_with_and_without(recipe: str, batch: int) -> None:
    torch.manual_seed(1)
    config = random_model.config(tiny=False, layers=3)
    made = random_model.model(config, recipe, torch.device("cuda"))
    assert is_fused(made)
    wanted = replayed(made, batch, overlap=False)
    assert all(logits.isfinite().all() for logits in wanted)
    for one, other in zip(replayed(made, batch, overlap=True), wanted, strict=True):
        assert torch.equal(one, other)
