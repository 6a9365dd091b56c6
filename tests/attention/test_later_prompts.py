"""A later prompt's attention to pictures in records: what it asks of the host, layer by layer."""

import pytest
import torch
from no_launches import leave_out_launches
from no_questions import NoQuestions
from parts_cases import HEAD_DIM, HEADS, LAYERS, PARTS, SPECS, Prompt

from duotone.attention import attend_chunk, chunk
from duotone.cache import Visibility
from duotone.quant import CacheSpec
from duotone.quant.checks import Checks, put_off

QUERIES = 6
# Operations of a layer, a tenth more than there are.
MOST = {"parts": 21, "two bits": 21, "spans": 153}


@pytest.fixture(autouse=True)
def dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel is launched, and no chunk attends from codes."""
    leave_out_launches(monkeypatch)
    monkeypatch.setattr("duotone.attention.reference.MAX_SCORES", 1)
    monkeypatch.setattr(chunk, "attend", None)


def stored(spec: CacheSpec) -> Prompt:
    """After a prompt with two pictures, of whose numbers nothing is known."""
    prompt = Prompt(spec, "some")
    prompt.apply(range(LAYERS))
    prompt.checks = Checks()
    return prompt


def mask_of(prompt: Prompt) -> torch.Tensor:
    return torch.ones(1, QUERIES, prompt.plan.tokens, dtype=torch.bool)


def attended(prompt: Prompt, layers: range, seen: Visibility) -> None:
    query = torch.randn(1, 2 * HEADS, QUERIES, HEAD_DIM, dtype=torch.bfloat16)
    for layer in layers:
        with put_off(prompt.checks):
            kv = prompt.stores[layer].segments(prompt.ledger.state, seen)
        attend_chunk(query, kv, sm_scale=0.1, seen=seen)


@pytest.mark.parametrize("policy", MOST)
def test_layers_after_the_second_ask_the_host_nothing(policy: str) -> None:
    prompt = stored(SPECS[policy])
    seen = Visibility(mask_of(prompt))
    attended(prompt, range(2), seen)
    with NoQuestions() as layers:
        attended(prompt, range(2, LAYERS), seen)
    assert layers.computed <= MOST[policy] * (LAYERS - 2)
    prompt.checks.settle()


def test_a_mask_that_hides_a_part_of_a_picture_is_refused_when_checks_are_made() -> None:
    prompt = stored(PARTS)
    mask = mask_of(prompt)
    mask[0, 2, 30] = False
    with pytest.raises(ValueError, match="hides a part of them"):
        prompt.stores[0].segments(prompt.ledger.state, Visibility(mask))
    with put_off(prompt.checks):
        prompt.stores[0].segments(prompt.ledger.state, Visibility(mask))
    with pytest.raises(ValueError, match="hides a part of them"):
        prompt.checks.settle()
