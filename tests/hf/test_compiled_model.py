"""A model under torch.compile answers as without it, or says why it cannot."""

from collections.abc import Callable, Iterator

import pytest
import torch
from small_specs import STREAM
from torch import Tensor
from transformers import PreTrainedModel, StaticCache

import duotone

from families import inputs, new_model


@pytest.fixture(autouse=True)
def no_compiled_code() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def logits(model: PreTrainedModel) -> Tensor:
    given = inputs("llama", [[9]])
    call = {"max_new_tokens": 3, "do_sample": False, "output_logits": True}
    return torch.stack(model.generate(**given, **call, return_dict_in_generate=True).logits)


def whole(model: PreTrainedModel) -> None:
    model.compile(backend="eager")


def forward(model: PreTrainedModel) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


def layers(model: PreTrainedModel) -> None:
    for layer in model.model.layers:
        layer.compile(backend="eager")


@pytest.mark.parametrize(
    ("compile_", "inside"),
    [
        (layers, True),
        pytest.param(whole, True, marks=pytest.mark.slow),
        pytest.param(forward, False, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_model_answers_as_the_plain_one(
    compile_: Callable[[PreTrainedModel], None], inside: bool
) -> None:
    model = new_model("llama")
    with duotone.enable(model, STREAM):
        expected = logits(model)
    if not inside:
        compile_(model)
    with duotone.enable(model, STREAM):
        if inside:
            compile_(model)
        assert torch.equal(logits(model), expected)


def test_one_graph_of_a_quantized_cache_is_refused_with_the_remedy() -> None:
    model = new_model("llama")
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    with (
        duotone.enable(model, STREAM),
        pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True"),
    ):
        logits(model)


@torch.no_grad()
def test_a_step_of_another_cache_stays_one_graph() -> None:
    model, given = new_model("llama"), inputs("llama", [[9], [5]])
    with duotone.enable(model, STREAM):
        outs = [
            call(**given, past_key_values=StaticCache(config=model.config, max_cache_len=32))
            for call in (model, torch.compile(model.__call__, backend="eager", fullgraph=True))
        ]
    torch.testing.assert_close(outs[1].logits, outs[0].logits, rtol=0, atol=1e-5)
