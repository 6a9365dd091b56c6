"""A model that has changed between two calls of a block decodes as what it is now."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from types import MethodType
from typing import Any

import pytest
import torch
from adapted import adapted_layers, stand_in
from replay_double import ReplayDouble, double, growing
from small_specs import STREAM
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.nn.utils.prune import l1_unstructured, remove
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

import duotone
from duotone.cuda_graph import CudaGraph
from duotone.hf.graphs import decode_call
from duotone.hf.graphs.model_state import ModelState

from families import inputs, new_model

__all__ = ["double"]  # a fixture

NEW = 12


def answer(model: PreTrainedModel, **more: Any) -> Any:
    given = inputs("llama", [[9], [5]])
    call = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, **more}
    return model.generate(**given, **call, return_dict_in_generate=True)


def logits(model: PreTrainedModel) -> Tensor:
    return torch.stack(answer(model).logits)


def other(x: Tensor) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(x) * 0.2


class Steered(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.vector = inner, None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        out = self.inner(*args, **kwargs)
        return out if self.vector is None else out + self.vector


def new_parameter(model: PreTrainedModel) -> None:
    model.lm_head.weight = nn.Parameter(other(model.lm_head.weight))


def swap_data(model: PreTrainedModel) -> None:
    linear = model.model.layers[0].mlp.up_proj
    linear.weight.data = other(linear.weight)


def assign_state(model: PreTrainedModel) -> None:
    state = {name: x + 0.1 * other(x) for name, x in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def exchange_module(model: PreTrainedModel) -> None:
    model.model.norm = nn.Identity()


def scale_attention(model: PreTrainedModel) -> None:
    model.model.layers[1].self_attn.scaling *= 3


def rescale_positions(model: PreTrainedModel) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq / 4


def patch_forward(model: PreTrainedModel) -> None:
    mlp = model.model.layers[0].mlp
    mlp.forward = MethodType(lambda self, x: 2 * type(self).forward(self, x), mlp)


def resize_embeddings(model: PreTrainedModel) -> None:
    model.resize_token_embeddings(model.config.vocab_size + 16)


def round_trip(model: PreTrainedModel) -> None:
    model.to(torch.bfloat16).to(torch.float32)


def set_vector(model: PreTrainedModel) -> None:
    hidden = model.config.hidden_size
    model.model.layers[1].mlp.vector = other(torch.empty(hidden)) * 5


def quantize(model: PreTrainedModel) -> None:
    from duotone.quantize import quantize_model
    from duotone.quantize.calibration import CalibrationSet
    from duotone.weights import get_recipe

    given = inputs("llama", [[9], [5]])
    quantize_model(model, get_recipe("rtn-w4a8"), CalibrationSet([given], {}, []))


def tie(model: PreTrainedModel) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def exchange_embeddings(model: PreTrainedModel) -> None:
    embeddings = nn.Embedding(*model.get_input_embeddings().weight.shape)
    embeddings.weight.data = other(embeddings.weight)
    model.set_input_embeddings(embeddings)


def parametrize(model: PreTrainedModel) -> None:
    up = weight_norm(model.model.layers[0].mlp.up_proj)
    up.parametrizations.weight.original0.data *= 2


def prune(model: PreTrainedModel) -> None:
    up = model.model.layers[0].mlp.up_proj
    remove(l1_unstructured(up, "weight", 0.5), "weight")


CHANGES = [
    new_parameter, swap_data, assign_state, exchange_module, scale_attention, rescale_positions,
    patch_forward, resize_embeddings, round_trip, set_vector, quantize,
    tie, exchange_embeddings, parametrize, prune,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_changed_model_is_seen(
    double: type[ReplayDouble], change: Callable[[PreTrainedModel], None]
) -> None:
    model = new_model("llama")
    if change is set_vector:
        model.model.layers[1].mlp = Steered(model.model.layers[1].mlp)
    with duotone.enable(model, STREAM):
        before = logits(model)
        captures = double.captures
        change(model)
        after = logits(model)
    assert captures == 2
    with duotone.enable(model, STREAM, graphs=False):
        assert torch.equal(after, logits(model))
    assert after.shape != before.shape or not torch.equal(after, before)


ADAPTERS = {
    "another": lambda layer: layer.set_adapter(["two"]),
    "disabled": lambda layer: layer.enable_adapters(False),
    "rescaled": lambda layer: layer.set_scale("one", 3.0),
    "merged": lambda layer: layer.merge(),
}


@pytest.mark.parametrize("change", ADAPTERS)
def test_changed_adapters_are_seen(double: type[ReplayDouble], change: str) -> None:
    model = stand_in("llama")
    with duotone.enable(model, STREAM):
        before = logits(model)
        for layer in adapted_layers(model):
            ADAPTERS[change](layer)
        after = logits(model)
    with duotone.enable(model, STREAM, graphs=False):
        assert torch.equal(after, logits(model))
    assert not torch.equal(after, before)


def test_a_capture_is_stale_without_the_look(
    double: type[ReplayDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The double shows what a graph would do."""
    model = new_model("llama")
    monkeypatch.setattr(decode_call.KeptSteps, "see", lambda *args: True)
    with duotone.enable(model, STREAM):
        logits(model)
        new_parameter(model)
        after = logits(model)
    with duotone.enable(model, STREAM, graphs=False):
        assert not torch.equal(after, logits(model))


def test_a_change_in_the_middle_of_a_call_is_seen_at_the_next_look(
    double: type[ReplayDouble], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_call, "LOOK_EVERY", 4)
    model = new_model("llama")

    def middle(ids: Tensor, scores: Tensor) -> Tensor:
        if ids.shape[1] == start + 4:
            model.model.layers[1].self_attn.scaling *= 3
        return scores

    start = inputs("llama", [[9], [5]])["input_ids"].shape[1]
    found = []
    for graphs in (True, False):
        with duotone.enable(model, STREAM, graphs=graphs):
            found.append(torch.stack(answer(model, logits_processor=[middle]).logits))
        model.model.layers[1].self_attn.scaling /= 3
    assert torch.equal(*found)


def test_a_forward_that_is_set_inside_the_block_runs_and_stays(double: type[ReplayDouble]) -> None:
    model = new_model("llama")

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


def test_another_attention_is_not_replayed(double: type[ReplayDouble]) -> None:
    model = new_model("llama")
    with duotone.enable(model, STREAM):
        logits(model)
        captures, replays = double.captures, double.replays
        model.set_attn_implementation("sdpa")
        with pytest.warns(duotone.SlowPathWarning, match="set_attn_implementation"):
            after = logits(model)
        assert (double.captures, double.replays) == (captures, replays)
        assert torch.isfinite(after).all()


class Counts(nn.Module):
    """A layer whose result depends on how often it was called."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) * (1 + 0.1 * self.calls)


def test_a_model_that_each_step_changes_runs_step_by_step(double: type[ReplayDouble]) -> None:
    model, found = new_model("llama"), []
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
    model, seen = new_model("llama"), []
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
