"""Gates between attention and its output projection: by the modules' own weights."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from duotone.calibrate.gates import Gates
from duotone.calibrate.moments import CalibrationBatch, gather_moments, output_metric
from duotone.hf.model.attentions import attentions
from duotone.hf.model.facts import model_facts

from families import inputs, tiny_model


def by_the_weights(model: PreTrainedModel, given: dict[str, Tensor]) -> list[Tensor]:
    """Gates [tokens, heads, head_dim] of every gated layer at the tokens of a prompt."""
    found, facts = [], model_facts(model)

    def hear(module: Any, args: Any, out: Tensor) -> None:
        gate = out.unflatten(-1, (facts.shape.q_heads, -1)).chunk(2, -1)[1]
        found.append(gate[given["attention_mask"].bool()].sigmoid().double())

    hooks = [a.q_proj.register_forward_hook(hear) for a in attentions(model, facts)]
    with torch.no_grad():
        model.generate(**given, max_new_tokens=1)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5"])
def test_gates_of_families_are_those_of_their_weights(name: str) -> None:
    """Text, one token to answer: the queries that count are the prompt's."""
    model, given = tiny_model(name), inputs(name, [[13], [6]])
    facts = model_facts(model)
    made = gather_moments(model, [CalibrationBatch(given, 1)], group=4)
    for layer, gate, attention in zip(
        made, by_the_weights(model, given), attentions(model, facts), strict=True
    ):
        assert layer.gated == len(gate) == 19
        expected = torch.einsum("nhd,nhe->hde", gate, gate)
        torch.testing.assert_close(layer.gates, expected, atol=1e-5, rtol=1e-4)
        metric = output_metric(attention, facts, expected / 19)
        torch.testing.assert_close(layer.output, metric, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_the_metric_is_the_mean_square_of_gated_errors_at_the_output() -> None:
    model = tiny_model("qwen3_next")
    facts, (attention, _) = model_facts(model), attentions(model, model_facts(model))
    kv, head_dim, groups = facts.shape.kv_heads, facts.shape.head_dim, 2
    draw = torch.Generator().manual_seed(0)
    gates = torch.rand(23, facts.shape.q_heads, head_dim, generator=draw).double()
    error = torch.randn(kv, head_dim, generator=draw).double()
    metric = output_metric(attention, facts, torch.einsum("nhd,nhe->hde", gates, gates) / 23)
    weight = attention.o_proj.weight.double()
    for head in range(kv):
        square = 0.0
        for q in range(head * groups, head * groups + groups):
            columns = weight[:, q * head_dim : (q + 1) * head_dim]
            square += (gates[:, q] * error[head] @ columns.T).square().sum(-1).mean()
        torch.testing.assert_close(error[head] @ metric[head] @ error[head], square)


@pytest.mark.parametrize("name", ["llama", "nemotron_h", "gemma3"])
def test_families_without_gates_have_the_plain_metric(name: str) -> None:
    model = tiny_model(name)
    facts, given = model_facts(model), inputs(name, [[11], [4]])
    made = gather_moments(model, [CalibrationBatch(given, 2)], group=4)
    for layer, attention in zip(made, attentions(model, facts), strict=True):
        assert not layer.gated
        assert torch.equal(layer.output, output_metric(attention, facts))


def test_what_is_no_output_of_attention_is_no_gate() -> None:
    """A projection of another input, and one that is given nothing, are left alone."""
    heard: list[Any] = []
    gates, linear = Gates(lambda *given: heard.append(given)), torch.nn.Linear(6, 2)
    linear.layer_idx = 3
    made = torch.tensor([[[[2.0, 0.0, 4.0], [1.0, 1.0, 1.0]]]])
    with gates.watching({3: linear}):
        linear(torch.rand(1, 1, 6))
        for given in (torch.rand(5, 6), made.flatten(2)):
            gates.attended(linear, made)
            linear(given)
        assert not heard
        gates.attended(linear, made)
        linear((made * 0.5).flatten(2))
    ((number, found),) = heard
    assert number == 3
    assert found.flatten().tolist() == [0.5, 0.0, 0.5, 0.5, 0.5, 0.5]
    linear(torch.rand(1, 1, 6))
    assert len(heard) == 1
