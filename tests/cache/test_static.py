"""Fixed buffers follow the ledger: same tokens, same schedule, whatever the lengths."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from duotone.cache import LayerStore, Ledger, StaticPlaces, StaticStore, flush_all
from duotone.cache.places import flush_count
from duotone.quant import CacheSpec, KVSpec, TensorSpec

HEADS, DIM = 2, 4
WIDTHS = st.integers(0, 5)


def stream(group: int, sink: int, recent: int) -> CacheSpec:
    tensor = TensorSpec(8, group=group)
    text = KVSpec(tensor, TensorSpec(8, along="channels"))
    return CacheSpec(visual="text", text=text, sink=sink, recent=recent)


def prefilled(spec: CacheSpec, lengths: list[int]) -> tuple[LayerStore, Ledger]:
    """A layer after a left-padded prompt; token t of sequence b is the number 100 b + t."""
    width = max(lengths)
    real = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    ledger, store = Ledger(spec, len(lengths), torch.device("cpu")), LayerStore(spec)
    count = real.cumsum(-1) - 1
    numbers = (100.0 * torch.arange(len(lengths))[:, None] + count)[:, None, :, None]
    states = numbers.expand(-1, HEADS, -1, DIM).contiguous()
    store.apply(ledger.plan(torch.zeros_like(real), real), states, states)
    return store, ledger


def values_of(store: StaticStore, batch: int) -> list[list[float]]:
    """The sorted numbers of each sequence, from all segments."""
    return [
        sorted(
            float(number)
            for segment in store.segments
            for number in segment.states("value")[b, 0, : int(segment.lengths[b]), 0]
        )
        for b in range(batch)
    ]


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    group=st.integers(1, 5),
    sink=WIDTHS,
    recent=WIDTHS,
)
def test_no_token_is_lost_or_twice(lengths: list[int], group: int, sink: int, recent: int) -> None:
    spec, steps = stream(group, sink, recent), 17
    layer, ledger = prefilled(spec, lengths)
    places, order = StaticPlaces.of(ledger.state, spec, steps)
    store, batch = StaticStore(layer, places, order), len(lengths)
    streamed = ledger.state.stream.lengths.clone()
    for step in range(steps):
        plan = ledger.plan(torch.zeros(batch, 1).bool(), torch.ones(batch, 1).bool())
        assert places.is_due(step) == bool(places.full().any()) == (plan.flush_first is not None)
        flush_all([store])
        places.advance()
        new = 100.0 * torch.arange(batch) + torch.tensor(lengths) + step
        states = new[:, None, None, None].expand(-1, HEADS, 1, DIM).contiguous()
        store.write(states, states)
        assert torch.equal(places.stream, plan.after.stream.lengths)
        assert torch.equal(places.dense, plan.after.dense.lengths)
    flushed = (places.stream - streamed) // spec.flush_tokens
    counts = [flush_count(m, steps, recent, spec.flush_tokens) for m in places.movable]
    assert flushed.tolist() == counts
    expected = [[100.0 * b + t for t in range(n + steps)] for b, n in enumerate(lengths)]
    for found, wanted in zip(values_of(store, batch), expected, strict=True):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), atol=0.3, rtol=0)


def test_a_wrong_slot_would_show() -> None:
    spec = stream(2, 0, 2)
    layer, ledger = prefilled(spec, [7])
    places, order = StaticPlaces.of(ledger.state, spec, 4)
    store = StaticStore(layer, places, order)
    before = values_of(store, 1)
    store.value[:, :, 0] = 99.0
    assert values_of(store, 1) != before
