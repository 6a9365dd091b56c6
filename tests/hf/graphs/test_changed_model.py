"""A model that has changed between two calls of a block decodes as what it is now."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from types import MethodType
from typing import Any

import pytest
import torch
from adapted import MAKERS
from model_changes import (
    ADAPTERS,
    CHANGES,
    PROMPT,
    Change,
    answer,
    around,
    logits,
    model_for,
    new_parameter,
    scale_attention,
)
from replay_double import ReplayDouble, double, growing
from small_specs import STREAM
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import duotone
from duotone.hf.graphs import decode_call
from duotone.hf.graphs.model_state import ModelState
from duotone.tools.cuda_graph import CudaGraph

from exactly import rounding_as
from families import inputs, logit_error, new_model

__all__ = ["double"]  # a fixture


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_is_seen(double: type[ReplayDouble], change: Change) -> None:
    before, after, plain = around(model_for(change).to(double.device), change)
    assert double.captures >= 2
    assert torch.equal(after, plain)
    assert after.shape != before.shape or not torch.equal(after, before)


@pytest.mark.parametrize("change", ADAPTERS)
@pytest.mark.parametrize("maker", MAKERS)
def test_changed_adapters_are_seen(
    double: type[ReplayDouble], maker: Callable[[str], PreTrainedModel], change: str
) -> None:
    before, after, plain = around(maker("llama").to(double.device), ADAPTERS[change])
    assert torch.equal(after, plain)
    assert not torch.equal(after, before)


def test_numbers_on_the_host_are_part_of_a_model() -> None:
    """A launch has them as arguments, such as scalings of PEFT that were made into tensors."""
    model = new_model("llama")
    model.model.sparse = torch.eye(4).to_sparse()  # has no address
    model.model.layers[0].mlp.scaling = {"one": torch.tensor(2.0)}
    before = ModelState(model)
    model.model.layers[0].mlp.scaling["one"].fill_(2.0)
    assert before.is_same(ModelState(model))
    model.model.layers[0].mlp.scaling["one"].fill_(3.0)
    assert not before.is_same(ModelState(model))


def test_weights_in_wrappers_may_move_after_a_look() -> None:
    """Weights that torchao quantizes are such."""
    model = new_model("llama")
    linear = model.model.layers[0].mlp.up_proj
    weight = linear.weight.data
    linear.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
    before = ModelState(model)
    assert before.is_same(ModelState(model))
    model.to(torch.bfloat16).to(torch.float32)
    assert not before.is_same(ModelState(model))


def test_the_precision_of_products_is_part_of_a_model() -> None:
    """Where it is set as PyTorch advises, `torch.get_float32_matmul_precision` raises."""
    model, products = new_model("llama"), torch.backends.cuda.matmul
    before, precision = ModelState(model), products.fp32_precision
    try:
        products.fp32_precision = "tf32"
        assert not before.is_same(ModelState(model))
    finally:
        products.fp32_precision = precision
    assert before.is_same(ModelState(model))


def test_a_capture_is_stale_without_the_look(
    double: type[ReplayDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The double shows what a graph would do."""
    model = new_model("llama").to(double.device)
    monkeypatch.setattr(decode_call.KeptSteps, "see", lambda *args: True)
    with duotone.enable(model, STREAM):
        logits(model)
        new_parameter(model)
        after = logits(model)
    with duotone.enable(model, STREAM, graphs=False):
        assert not torch.equal(after, logits(model))


def hook(model: PreTrainedModel) -> None:
    model.model.layers[1].register_forward_hook(lambda module, args, out: out * -3)


@pytest.mark.parametrize("change", [scale_attention, hook], ids=lambda change: change.__name__)
def test_a_change_in_the_middle_of_a_call_is_seen_at_the_next_look(
    double: type[ReplayDouble], monkeypatch: pytest.MonkeyPatch, change: Change
) -> None:
    monkeypatch.setattr(decode_call, "LOOK_EVERY", 4)

    def middle(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == start + 4:
            change(models[-1])
        return scores

    start, models, found = inputs("llama", PROMPT)["input_ids"].shape[1], [], []
    for graphs in (True, False):
        # float64: a sum's order, which differs between buffers, moves no code.
        models.append(new_model("llama").double().to(double.device))
        enabled = duotone.enable(models[-1], STREAM, graphs=graphs)
        with warnings.catch_warnings(), rounding_as(torch.float64), enabled:
            warnings.simplefilter("ignore", duotone.SlowPathWarning)
            found.append(torch.stack(answer(models[-1], logits_processor=[middle]).logits))
    assert double.captures
    assert logit_error(*found) < 1e-9


def test_a_forward_that_is_set_inside_the_block_runs_and_stays(double: type[ReplayDouble]) -> None:
    model = new_model("llama").to(double.device)

    @wraps(type(model).forward)
    def louder(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        out = type(self).forward(self, *args, **kwargs)
        out.logits = 3 * out.logits.flip(-1)
        return out

    with duotone.enable(model, STREAM):
        before = logits(model)
        model.forward = MethodType(louder, model)
        with pytest.warns(duotone.SlowPathWarning, match=r"model.forward was replaced"):
            after = logits(model)
    assert not torch.equal(before, after)
    assert model.forward.__func__ is louder
    with growing(), duotone.enable(model, STREAM):
        assert torch.equal(after, logits(model))
    assert model.forward.__func__ is louder


@pytest.mark.parametrize("name", ["eager", "sdpa"])
def test_another_attention_is_not_replayed(double: type[ReplayDouble], name: str) -> None:
    found = []
    for graphs in (True, False):
        model = new_model("llama").to(double.device)
        with duotone.enable(model, STREAM, graphs=graphs):
            logits(model)
            model.set_attn_implementation(name)
            with pytest.warns(duotone.SlowPathWarning, match="set_attn_implementation"):
                found.append(logits(model))
    assert double.captures == 2
    assert torch.equal(*found)


class Counts(nn.Module):
    """A layer whose result depends on how often it was called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (1 + 0.1 * self.calls)


def test_a_model_that_each_step_changes_runs_step_by_step(double: type[ReplayDouble]) -> None:
    model, found = new_model("llama").to(double.device), []
    plain = model.model.layers[0].mlp
    for graphs in (True, False):
        model.model.layers[0].mlp = Counts(plain)
        said = pytest.warns(duotone.SlowPathWarning, match="a step changes attributes")
        with said if graphs else nullcontext(), duotone.enable(model, STREAM, graphs=graphs):
            found.append(torch.stack([logits(model), logits(model)]))
    assert torch.equal(*found)
    assert not double.replays


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen += "mm" in str(func)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_around_a_later_call_sees_all_steps(double: type[ReplayDouble]) -> None:
    model, seen = new_model("llama").to(double.device), []
    with duotone.enable(model, STREAM):
        logits(model)
        assert double.replays
        for _ in range(2):
            with Products() as products, warnings.catch_warnings():
                warnings.simplefilter("ignore", duotone.SlowPathWarning)
                logits(model)
            seen.append(products.seen)
    with duotone.enable(model, STREAM, graphs=False), Products() as products:
        logits(model)
    assert seen == [products.seen] * 2


def test_a_tower_that_no_step_runs_is_not_looked_at() -> None:
    model = new_model("internvl")
    before = ModelState(model)
    model.model.vision_tower.extra = 3
    assert before.is_same(ModelState(model))
    model.model.language_model.extra = 3
    assert not before.is_same(ModelState(model))


def test_a_capture_needs_the_allocator_that_has_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    with pytest.raises(RuntimeError, match="native allocator; got 'cudaMallocAsync'"):
        CudaGraph(lambda: None, torch.device("cuda"))
