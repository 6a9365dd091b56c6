"""Stores of a run that keeps the average of its layers' codes, fed with random K and V."""

import copy

import pytest
import torch
from torch import Tensor

from duotone.cache import LayerStore, Ledger, memory_report
from duotone.cache.sharing import share_codes
from duotone.quant import CacheSpec, KVSpec, TensorSpec, average_codes, pack

TEXT = KVSpec(TensorSpec(2, group=4), TensorSpec(2, "channels", 8))
SPANS = KVSpec(TensorSpec(1, eta=0.1), TensorSpec(4, group=8))
SPEC = CacheSpec(visual=SPANS, text=TEXT, sink=1, recent=3)
WEIGHTS = {"pair": (0.6, 0.4), "three": (0.2, 0.5, 0.3), "third-unused": (0.5, 0.5, 0.0)}
BATCH, HEADS, DIM, TOKENS = 2, 2, 24, 41
PIECES = {"at-once": [41], "one-by-one": [1] * 41, "mixed": [7, 1, 1, 20, 1, 10, 1]}


def fed(layers: int, share: dict | None, sizes: list[int], spec: CacheSpec = SPEC):
    """(ledger, stores) after the same random tokens, every third of the first 21 visual."""
    ledger = Ledger(spec, BATCH, torch.device("cpu"))
    stores = [LayerStore(spec) for _ in range(layers)]
    if share is not None:
        for which in ("key", "value"):
            share_codes(which, stores, stores[share["keeper"]], share["weights"])
    real = torch.ones(BATCH, TOKENS, dtype=torch.bool)
    real[1, :3] = False
    visual = (torch.arange(TOKENS) % 3 == 1) & (torch.arange(TOKENS) < 21)
    generator = torch.Generator().manual_seed(3)
    states = torch.randn(layers, 2, BATCH, HEADS, TOKENS, DIM, generator=generator)
    for part in torch.arange(TOKENS).split(sizes):
        plan = ledger.plan(visual[part].expand(BATCH, -1).clone(), real[:, part])
        if plan.flush_first is not None:
            for store in stores:
                store.flush(plan.flush_first)
        for store, (key, value) in zip(stores, states[..., part, :], strict=True):
            store.apply(plan, key, value)
    return ledger, stores


def kept(tensor, lengths: Tensor) -> Tensor:
    """The codes of all tokens, one sequence behind the other."""
    return torch.cat([codes[:, :n] for codes, n in zip(tensor.unpacked(), lengths, strict=True)], 1)


@pytest.mark.parametrize("sizes", PIECES.values(), ids=PIECES)
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("last", [False, True], ids=["keeper-first", "keeper-last"])
def test_a_run_keeps_the_average_of_its_layers_codes(weights, sizes, last) -> None:
    layers = len(weights)
    keeper = layers - 1 if last else 0
    ledger, stores = fed(layers, {"keeper": keeper, "weights": weights}, sizes)
    _, alone = fed(layers, None, sizes)
    for name in ("visual", "stream"):
        lengths = getattr(ledger.state, name).lengths.tolist()
        for which in ("key", "value"):
            own = [kept(getattr(getattr(store, name), which), lengths) for store in alone]
            for index, store in enumerate(stores):
                stored = getattr(getattr(store, name), which)
                assert (stored.codes is None) == (index != keeper)
                full = getattr(store._complete(name), which)
                assert torch.equal(kept(full, lengths), average_codes(own, weights))
                theirs = getattr(getattr(alone[index], name), which)
                assert torch.equal(full.scale, theirs.scale)
                assert torch.equal(full.zero_point, theirs.zero_point)


@pytest.mark.parametrize("which", ["key", "value"])
def test_pieces_equal_all_at_once(which: str) -> None:
    share = {"keeper": 1, "weights": (0.3, 0.7)}
    stream = SPEC.replace(visual="text")
    found = []
    for sizes in PIECES.values():
        ledger, stores = fed(2, share, sizes, stream)
        lengths = ledger.state.stream.lengths.clamp_max(24).tolist()
        found.append(kept(getattr(stores[0]._complete("stream"), which), lengths))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("sizes", PIECES.values(), ids=PIECES)
def test_weight_on_one_layer_is_that_layer_dominant(sizes) -> None:
    for keeper in range(3):
        one_hot = tuple(float(i == keeper) for i in range(3))
        averaged, plain = (
            fed(3, {"keeper": keeper, "weights": weights}, sizes) for weights in (one_hot, None)
        )
        reports = [
            memory_report(stores, [ledger.state] * 3, 0.0) for ledger, stores in (averaged, plain)
        ]
        assert reports[0] == reports[1]
        for name in ("visual", "stream"):
            for which in ("key", "value"):
                ours, theirs = (
                    getattr(getattr(stores[keeper], name), which) for _, stores in (averaged, plain)
                )
                assert torch.equal(ours.codes, theirs.codes)
                assert ours.codes.is_contiguous()
                assert ours.codes.untyped_storage().nbytes() == theirs.codes.nbytes


def test_nothing_waits_behind_a_step_and_copies_stay_apart() -> None:
    _, stores = fed(3, {"keeper": 1, "weights": (0.2, 0.5, 0.3)}, [41])
    assert not any(store.runs["key"].waiting for store in stores)
    clones = copy.deepcopy(stores)
    assert clones[0].runs["key"].waiting is clones[2].runs["key"].waiting
    assert clones[0].runs["key"].waiting is not stores[0].runs["key"].waiting
    assert clones[0].sources["key"] is clones[1]


def test_half_a_run_waits_packed() -> None:
    stores = [LayerStore(SPEC) for _ in range(2)]
    share_codes("key", stores, stores[0], (0.5, 0.5))
    ledger = Ledger(SPEC, 1, torch.device("cpu"))
    real = torch.ones(1, 12, dtype=torch.bool)
    states = torch.randn(1, HEADS, 12, DIM)
    stores[0].apply(ledger.plan(torch.arange(12)[None] < 4, real), states, states)
    waiting = stores[1].runs["key"].waiting
    assert {name: codes[0].shape[-1] for name, codes in waiting.items()} == {
        "visual": pack(torch.zeros(DIM, dtype=torch.uint8), 1).numel(),
        "stream": pack(torch.zeros(DIM, dtype=torch.uint8), 2).numel(),
    }
