"""Tests of `test_changed_model`, with real CUDA graphs; models that are offloaded or waited for."""

import threading
import warnings
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted import NEEDS_PEFT, hotswap, wrapped_by_peft
from model_changes import around, logits
from small_specs import STREAM
from test_changed_model import (  # noqa: F401, run here with the fixture below
    test_a_capture_is_stale_without_the_look,
    test_a_change_in_the_middle_of_a_call_is_seen_at_the_next_look,
    test_a_changed_model_is_seen,
    test_a_dispatch_mode_around_a_later_call_sees_all_steps,
    test_a_forward_that_is_set_inside_the_block_runs_and_stays,
    test_a_model_that_each_step_changes_runs_step_by_step,
    test_another_attention_is_not_replayed,
    test_changed_adapters_are_seen,
)
from torch import Tensor

import duotone
from duotone.hf.graphs import decode_steps, kept_steps
from duotone.tools.cuda_graph import CudaGraph
from duotone.tools.slow_paths import SlowPathWarning

from families import new_model

pytestmark = pytest.mark.gpu


class Counted(CudaGraph):
    """Has the counts of `ReplayDouble`."""

    captures = replays = 0
    device = "cuda"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        type(self).captures += 1

    def replay(self) -> None:
        type(self).replays += 1
        super().replay()


@pytest.fixture
def double(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    """No double at all."""
    kind = type("Counted", (Counted,), {})
    monkeypatch.setattr(decode_steps, "capture", kind)
    # Models are shared by tests; their captures are not.
    monkeypatch.setattr(kept_steps, "_KEPT", weakref.WeakKeyDictionary())
    return kind


@pytest.mark.parametrize("scaling", [pytest.param(s, marks=NEEDS_PEFT) for s in (float, Tensor)])
def test_a_hotswapped_adapter_is_seen(double: type[Counted], scaling: type, tmp_path: Path) -> None:
    wrapper = wrapped_by_peft("llama")
    if scaling is Tensor:
        from peft.utils.hotswap import prepare_model_for_compiled_hotswap

        # Its scalings are tensors then, and stay on the CPU.
        prepare_model_for_compiled_hotswap(wrapper)
    model = wrapper.cuda().get_base_model()
    before, after, plain = around(model, lambda model: hotswap(wrapper, tmp_path))
    assert double.captures >= 2
    assert torch.equal(after, plain)
    assert not torch.equal(after, before)


# Its parameters lie on "meta" between calls, its ids do not.
@pytest.mark.filterwarnings("ignore:You are calling .generate")
def test_weights_that_accelerate_offloads_run_step_by_step(double: type[Counted]) -> None:
    accelerate, found = pytest.importorskip("accelerate"), []
    for graphs in (True, False):
        model = accelerate.cpu_offload(new_model("llama"), torch.device("cuda", 0))
        with duotone.enable(model, STREAM, graphs=graphs):
            with pytest.warns(SlowPathWarning, match="all weights on the cache's device"):
                found.append(logits(model, "cuda"))
            found.append(logits(model, "cuda"))
    assert not double.captures
    assert all(torch.equal(x, found[0]) for x in found)


def test_a_thread_that_waits_for_the_device_breaks_no_answer(double: type[Counted]) -> None:
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
    assert double.captures >= 2
    assert all(torch.equal(x, found[-1]) for x in found)
