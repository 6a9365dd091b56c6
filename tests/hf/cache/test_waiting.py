"""Layers that wait to be stored, and with whom."""

from dataclasses import replace

import pytest
import torch

import duotone
from duotone.cache import AppendPlan, LayerStore, Ledger
from duotone.hf.cache import waiting
from duotone.hf.cache.waiting import Waiting

SPEC = duotone.scheme("lloyd", bits=2)


def plan(tokens: int = 5, spec: duotone.CacheSpec = SPEC) -> AppendPlan:
    visual = torch.zeros(1, tokens, dtype=torch.bool)
    return Ledger(spec, 1, visual.device).plan(visual, ~visual)


def states(heads: int = 2, tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, heads, tokens, 8), torch.zeros(1, heads, tokens, 8)


def test_layers_of_one_form_and_plan_are_stored_together() -> None:
    stores = [LayerStore(SPEC) for _ in range(6)]
    stores[2].lends.add("key")
    stores[4] = LayerStore(duotone.scheme("minmax", bits=2))
    held = Waiting({n: states(heads=3 if n == 3 else 2) for n in range(6)})
    one = plan()
    assert held.groups(stores, [one] * 6) == [[0, 1, 5], [2], [3], [4]]
    other = plan()
    assert held.groups(stores, [one, other, one, one, one, other]) == [[0], [1, 5], [2], [3], [4]]
    assert held.groups(stores, [None, one, None, None, None, one]) == [[1, 5]]


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_layers_wait_up_to_a_bound(layers: int, monkeypatch) -> None:
    bytes_of_one = sum(x.nbytes for x in states())
    monkeypatch.setattr(waiting, "JOINED_BYTES", layers * bytes_of_one)
    stores, plans, held = [LayerStore(SPEC)] * 4, [plan()] * 4, Waiting()
    assert held.may_grow(stores, plans)
    for index in range(layers):
        assert held.may_grow(stores, plans)
        held[index] = states()
    assert not held.may_grow(stores, plans)


def test_stored_tokens_that_change_count() -> None:
    store, held = LayerStore(SPEC), Waiting({0: states()})
    assert held.may_grow([store], [plan()])
    store.key = torch.empty(1, 2, waiting.JOINED_BYTES // 8, 4, device="meta")
    assert not held.may_grow([store], [plan()])


def test_nothing_waits_without_a_plan_in_a_decode_step_or_where_layers_cannot_join() -> None:
    store, held = LayerStore(SPEC), Waiting({0: states()})
    assert not held.may_grow([store], [None])
    assert not held.may_grow([store], [replace(plan(), tokens=1)])
    store.lends.add("key")
    assert not held.may_grow([store], [plan()])
