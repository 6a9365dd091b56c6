"""Decode steps as real CUDA graphs: long answers, many calls, models that ask the host."""

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from replay_double import growing
from torch import Tensor, nn
from transformers import PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.cuda_graph import CudaGraph
from duotone.hf import decode_steps
from duotone.slow_paths import SlowPathWarning

from exactly import rounding_as
from families import TEXT_ONLY, exact_model, inputs, new_model, typed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

TWO = TensorSpec(2)
MIXED = CacheSpec(
    visual=KVSpec(TWO, TensorSpec(2, along="channels")),
    text=KVSpec(TensorSpec(2, group=32), TensorSpec(2, along="channels", group=8)),
    sink=2,
    recent=30,
    ranges="run",
)
FEW = ("internvl", "qwen2_vl", "llama")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[CudaGraph]:
    """The graphs that are captured in a test."""
    made: list[CudaGraph] = []

    def capture(*args: Any) -> CudaGraph:
        made.append(CudaGraph(*args))
        return made[-1]

    monkeypatch.setattr(decode_steps, "capture", capture)
    return made


def prompt_of(name: str, rows: int = 2, seed: int = 1) -> dict[str, Tensor]:
    texts = [[23], [9], [16]] if name in TEXT_ONLY else [[3, "image", 9, "image", 4], [11], [7]]
    return {n: x.cuda() for n, x in inputs(name, texts[:rows], seed=seed).items()}


def answer(model: PreTrainedModel, given: dict, graphs: bool, **settings: Any) -> Tensor:
    call = {"max_new_tokens": 512, "do_sample": False, **settings}
    path = nullcontext() if graphs else growing()
    with rounding_as(model.dtype), path, duotone.enable(model, MIXED):
        torch.manual_seed(3)
        return model.generate(**typed(model, given), **call)


HOW = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 1.3},
    "beams": {"num_beams": 3, "max_new_tokens": 120},
}
CASES = [(name, "greedy") for name in FEW] + [("internvl", "sampled"), ("internvl", "beams")]


@pytest.mark.parametrize(("name", "how"), CASES)
def test_512_tokens_are_those_of_step_by_step(
    name: str, how: str, captures: list[CudaGraph]
) -> None:
    """In float64, where no last digit of a sum decides a code."""
    model, given = exact_model(name).cuda(), prompt_of(name)
    try:
        ours = answer(model, given, True, **HOW[how])
        assert len(captures) == 2
        assert torch.equal(ours, answer(model, given, False, **HOW[how]))
    finally:
        model.cpu()


def test_many_calls_hold_no_more_than_the_first(captures: list[CudaGraph]) -> None:
    """With other batch sizes between, captures are made anew; memory stays."""
    model, held, made = new_model("internvl").cuda(), [], []
    with duotone.enable(model, MIXED):
        for call in range(12):
            given = prompt_of("internvl", rows=1 if call % 4 == 3 else 2, seed=call)
            model.generate(**given, max_new_tokens=80, do_sample=False)
            del given
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
            made.append(len(captures))
            captures[:] = [None] * len(captures)
    assert held[4:7] == held[8:11]
    assert held[5] == held[6]
    # Calls alike are captured once: only another batch size makes new ones.
    assert made[:3] == [made[0]] * 3
    assert made[4:7] == [made[4]] * 3


class Asks(nn.Module):
    """A layer that asks the device for a number at every step."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * (1 if float(x.sum()) > -1e30 else 0)


def test_a_model_that_asks_the_host_runs_step_by_step() -> None:
    model, given = new_model("llama").cuda(), prompt_of("llama")
    model.model.layers[0].mlp = Asks(model.model.layers[0].mlp)
    with warnings.catch_warnings(), growing(), duotone.enable(model, MIXED):
        warnings.simplefilter("ignore", SlowPathWarning)
        theirs = model.generate(**given, max_new_tokens=40, do_sample=False)
    with duotone.enable(model, MIXED), pytest.warns(SlowPathWarning, match="cannot be captured"):
        ours = model.generate(**given, max_new_tokens=40, do_sample=False)
    assert torch.equal(ours, theirs)
    del model.model.layers[0].mlp
    after = new_model("llama").cuda()
    with duotone.enable(after, MIXED):  # the device goes on working
        assert after.generate(**given, max_new_tokens=40, do_sample=False).shape[1] == 63


def test_a_later_turn_thaws_and_freezes_again(captures: list[CudaGraph]) -> None:
    model, given, turns = exact_model("internvl").cuda(), prompt_of("internvl"), []
    given = typed(model, given)
    try:
        for graphs in (True, False):
            cache = duotone.QuantizedCache(model, MIXED)
            path = nullcontext() if graphs else growing()
            with rounding_as(model.dtype), path, duotone.enable(model, MIXED):
                call = {"past_key_values": cache, "max_new_tokens": 70, "do_sample": False}
                first = model.generate(**given, **call)
                ids = torch.cat([first, first[:, -3:]], 1)
                mask = torch.cat([given["attention_mask"], ids.new_ones(2, 73)], 1)
                call |= {"input_ids": ids, "attention_mask": mask}
                turns.append(model.generate(**call))
        assert torch.equal(*turns)
        assert len(captures) >= 3
    finally:
        model.cpu()
