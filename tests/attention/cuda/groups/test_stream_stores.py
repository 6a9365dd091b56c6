"""Stores whose streams are in group records keep what stores in canonical order keep."""

import gc
import weakref

import pytest
import torch
from no_questions import NoQuestions

import duotone
from duotone.attention import attend
from duotone.attention.cuda.groups.records import GroupLayout, GroupRecords
from duotone.cache import LayerStore, Ledger, StaticPlaces, StaticStore, flush_all
from duotone.cache.pair import Layouts
from duotone.cache.segments import Segment
from duotone.cache.sharing import share_layers
from duotone.quant import CacheSpec, Sharing

HEADS, DIM, STEPS = 2, 64, 40
LENGTHS = (120, 33, 70)
KIVI = duotone.scheme("kivi", bits=2)
SPECS = {
    "kivi": KIVI.replace(recent=32),
    "no window": KIVI.replace(recent=0),
    "sinks and norms": duotone.scheme("innerq").replace(sink=4, recent=32, key_norm=True),
}
LAYOUTS = Layouts(stream=GroupLayout())


def decode(spec: CacheSpec, layouts: Layouts | None, static: bool) -> tuple[list, list]:
    """(segments, outputs of attention at all steps)."""
    torch.manual_seed(0)
    width = max(LENGTHS)
    real = torch.arange(width) >= width - torch.tensor(LENGTHS)[:, None]
    ledger, store = Ledger(spec, len(LENGTHS), torch.device("cpu")), LayerStore(spec, layouts)
    store.apply(ledger.plan(torch.zeros_like(real), real), *states(width))
    frozen = None
    if static:
        places, order = StaticPlaces.of(ledger.state, spec, STEPS)
        frozen = StaticStore(store, places, order)
    outputs = []
    for _ in range(STEPS):
        segments = static_step(frozen) if frozen else growing_step(store, ledger)
        query = torch.randn(len(LENGTHS), HEADS * 2, 1, DIM)
        outputs.append(attend(query, segments, sm_scale=DIM**-0.5))
    return segments, outputs


def states(tokens: int) -> list[torch.Tensor]:
    return [torch.randn(len(LENGTHS), HEADS, tokens, DIM).half().float() for _ in range(2)]


def growing_step(store: LayerStore, ledger: Ledger) -> list[Segment]:
    one = torch.ones(len(LENGTHS), 1, dtype=torch.bool)
    store.apply(ledger.plan(~one, one), *states(1))
    return store.segments(ledger.state)


def static_step(store: StaticStore) -> list[Segment]:
    flush_all([store])
    store.places.advance()
    store.write(*states(1))
    return store.segments


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", SPECS)
def test_attention_sees_the_same(name: str, static: bool) -> None:
    plain, expected = decode(SPECS[name], None, static)
    laid, found = decode(SPECS[name], LAYOUTS, static)
    assert isinstance(laid[0].records, GroupRecords)
    assert plain[0].records is None
    assert torch.equal(laid[0].lengths, plain[0].lengths)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


ROTATED = duotone.TensorSpec(2, "channels", 32, "hybrid", transform="hadamard")


@pytest.mark.parametrize("name", ["kivi", "innerq", "rotated"])
def test_a_flush_into_records_asks_the_host_nothing(name: str) -> None:
    spec = duotone.scheme("innerq" if name == "rotated" else name).replace(sink=0, recent=32)
    if name == "rotated":  # what no packing kernel does, so that torch does it on a GPU, too
        spec = spec.replace(text=spec.text.replace(key=ROTATED))
    torch.manual_seed(0)
    real = torch.ones(len(LENGTHS), 100, dtype=torch.bool)
    ledger = Ledger(spec, len(LENGTHS), torch.device("cpu"))
    layer = LayerStore(spec, LAYOUTS)
    layer.apply(ledger.plan(torch.zeros_like(real), real), *states(100))
    store = StaticStore(layer, *StaticPlaces.of(ledger.state, spec, STEPS))
    assert isinstance(store.stream.records, GroupRecords)
    before = store.stream.records.data.clone()
    full = torch.tensor([True, False, True])
    store.flush(full)  # as one before every capture
    with NoQuestions() as watch:
        store.flush(full)
    assert watch.seen > 20
    assert (store.stream.records.data != before).flatten(1).any(1).tolist() == full.tolist()


@pytest.mark.parametrize("dominant", [0, 1])
def test_a_run_flushes_its_codes_once_and_asks_the_host_nothing(dominant: int) -> None:
    share = Sharing(key=0, value=0, dominant=dominant)
    spec = SPECS["kivi"].replace(share=share)
    torch.manual_seed(0)
    real = torch.ones(len(LENGTHS), 100, dtype=torch.bool)
    ledger = Ledger(spec, len(LENGTHS), torch.device("cpu"))
    layers = [LayerStore(spec, LAYOUTS) for _ in range(2)]
    share_layers(layers, spec)
    plan = ledger.plan(torch.zeros_like(real), real)
    for layer in layers:
        layer.apply(plan, *states(100))
    places, order = StaticPlaces.of(ledger.state, spec, STEPS)
    stores = [StaticStore(layer, places, order) for layer in layers]
    stores[1 - dominant].share(dict.fromkeys(("key", "value"), stores[dominant]))
    keeps, reads = stores[dominant].stream.records, stores[1 - dominant].stream.records
    before = [x.clone() for x in keeps.codes]
    assert reads.codes == (None, None)
    full = torch.tensor([True, False, True])
    for store in stores:
        store.flush(full)
    with NoQuestions() as watch:
        for store in stores:
            store.flush(full)
    assert watch.seen > 40
    for old, new in zip(before, keeps.codes, strict=True):
        assert (old != new).flatten(1).any(1).tolist() == full.tolist()
    seen = stores[1 - dominant].segments[0].records
    assert all(x is y for x, y in zip(seen.codes, keeps.codes, strict=True))


def test_a_frozen_run_has_one_order() -> None:
    """Layers by themselves settle it; a cache does before (`cache.static.settle_orders`)."""
    spec = SPECS["kivi"].replace(share=Sharing(key=0))
    ledger = Ledger(spec, len(LENGTHS), torch.device("cpu"))
    layers = [LayerStore(spec, layouts) for layouts in (LAYOUTS, None)]
    share_layers(layers, spec)
    assert not any(layer.layout_of("stream") for layer in layers)
    # Nothing has left the window, so that no layer has been laid out.
    real = torch.ones(len(LENGTHS), 40, dtype=torch.bool)
    plan = ledger.plan(torch.zeros_like(real), real)
    for layer in layers:
        layer.apply(plan, *states(40))
    layers[0].canonical.clear()
    places, order = StaticPlaces.of(ledger.state, spec, STEPS)
    stores = [StaticStore(layer, places, order) for layer in layers]
    with pytest.raises(ValueError, match="in one order"):
        stores[1].share({"key": stores[0]})


def test_runs_that_meet_have_one_order_and_others_their_own() -> None:
    # K: 0 with 1, 2 with 3. V: 1 with 2, 3 with 4.
    spec = SPECS["kivi"].replace(share=Sharing(key=0, value=1))
    layers = [LayerStore(spec, LAYOUTS) for _ in range(5)]
    share_layers(layers, spec)
    assert all(layer.canonical is layers[0].canonical for layer in layers)
    assert all(layer.layout_of("stream") is not None for layer in layers)
    assert layers[0].canonical == {"visual"}
    pairs = [LayerStore(spec, LAYOUTS if i != 1 else None) for i in range(5)]
    share_layers(pairs, spec.replace(share=Sharing(key=0, value=0)))
    orders = [layer.layout_of("stream") is not None for layer in pairs]
    assert orders == [False, False, True, True, True]
    assert pairs[4].layout_of("visual") is LAYOUTS.visual


def test_stores_that_share_go_with_their_last_user() -> None:
    spec = SPECS["kivi"].replace(share=Sharing(key=0, value=1))
    layers = [LayerStore(spec, LAYOUTS) for _ in range(3)]
    share_layers(layers, spec)
    watched = [weakref.ref(layer) for layer in layers]
    gc.disable()
    try:
        del layers
        assert not any(layer() for layer in watched)
    finally:
        gc.enable()
