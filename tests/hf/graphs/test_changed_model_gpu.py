"""A model that changes, is offloaded or is waited for, as real CUDA graphs see it."""

import threading
import warnings
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from adapted import MAKERS, NEEDS_PEFT, hotswap, wrapped_by_peft
from model_changes import (
    ADAPTERS,
    CHANGES,
    Change,
    around,
    around_adapters,
    by_another_attention,
    hook,
    in_the_middle,
    logits,
    model_for,
    scale_attention,
)
from small_specs import STREAM
from torch import Tensor

import duotone
from duotone.cuda_graph import CudaGraph
from duotone.hf.graphs import decode_call, decode_steps, kept_steps
from duotone.slow_paths import SlowPathWarning

from families import new_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """An entry per capture that a test tries; False where it broke off."""
    tried: list[bool] = []

    def capture(*args: object) -> CudaGraph:
        tried.append(False)
        graph = CudaGraph(*args)
        tried[-1] = True
        return graph

    monkeypatch.setattr(decode_steps, "capture", capture)
    # Models are shared by tests; their captures are not.
    monkeypatch.setattr(kept_steps, "_KEPT", weakref.WeakKeyDictionary())
    return tried


def assert_seen(found: list[Tensor], captures: list[bool]) -> None:
    before, after, plain = found
    assert captures[:2] == [True, True]
    assert torch.equal(after, plain)
    assert after.shape != before.shape or not torch.equal(after, before)


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_is_seen(captures: list[bool], change: Change) -> None:
    assert_seen(around(model_for(change).cuda(), change), captures)


@pytest.mark.parametrize("change", ADAPTERS)
@pytest.mark.parametrize("maker", MAKERS)
def test_changed_adapters_are_seen(captures: list[bool], maker: Change, change: str) -> None:
    assert_seen(around_adapters(maker("llama").cuda(), change), captures)


@pytest.mark.parametrize("scaling", [pytest.param(s, marks=NEEDS_PEFT) for s in (float, Tensor)])
def test_a_hotswapped_adapter_is_seen(captures: list[bool], scaling: type, tmp_path: Path) -> None:
    wrapper = wrapped_by_peft("llama")
    if scaling is Tensor:
        from peft.utils.hotswap import prepare_model_for_compiled_hotswap

        # Its scalings are tensors then, and stay on the CPU.
        prepare_model_for_compiled_hotswap(wrapper)
    model = wrapper.cuda().get_base_model()
    assert_seen(around(model, lambda model: hotswap(wrapper, tmp_path)), captures)


@pytest.mark.parametrize("change", [scale_attention, hook], ids=lambda change: change.__name__)
def test_a_change_in_the_middle_of_a_call_is_seen_at_the_next_look(
    captures: list[bool], monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    monkeypatch.setattr(decode_call, "LOOK_EVERY", 4)
    models = (new_model("llama").cuda() for _ in range(2))
    ours, plain = (in_the_middle(next(models), change, graphs) for graphs in (True, False))
    assert captures
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_another_attention_is_not_replayed(captures: list[bool], name: str) -> None:
    ours, plain = (by_another_attention(name, graphs, "cuda") for graphs in (True, False))
    assert captures == [True, True]
    assert torch.equal(ours, plain)


def test_weights_that_accelerate_offloads_run_step_by_step(captures: list[bool]) -> None:
    accelerate, found = pytest.importorskip("accelerate"), []
    for graphs in (True, False):
        model = accelerate.cpu_offload(new_model("llama"), torch.device("cuda", 0))
        with duotone.enable(model, STREAM, graphs=graphs):
            with pytest.warns(SlowPathWarning, match="all weights on the cache's device"):
                found.append(logits(model, "cuda"))
            found.append(logits(model, "cuda"))
    assert not captures
    assert all(torch.equal(x, found[0]) for x in found)


def test_a_thread_that_waits_for_the_device_breaks_no_answer(captures: list[bool]) -> None:
    """CUDA refuses to wait while anybody captures, and the capture breaks off."""
    model, left, found = new_model("llama").cuda(), [1], []
    mlp = model.model.layers[0].mlp

    def wait() -> None:
        with suppress(RuntimeError):
            torch.cuda.synchronize()

    def forward(x: Tensor) -> Tensor:
        if left and torch.cuda.is_current_stream_capturing():
            left.pop()
            thread = threading.Thread(target=wait)
            thread.start()
            thread.join()
        return type(mlp).forward(mlp, x)

    mlp.forward = forward
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowPathWarning)
        for graphs in (True, True, False):
            with duotone.enable(model, STREAM, graphs=graphs):
                found.append(logits(model))
    assert not left
    assert captures[-2:] == [True, True]
    assert all(torch.equal(x, found[-1]) for x in found)
