"""A cache that holds still: what it refuses, what it counts, and that it goes on after a thaw."""

import copy
from collections.abc import Iterator

import pytest
import torch
from held_still import HeldStill, decode
from small_specs import MIXED, SPECS, STREAM, VISUAL

import duotone
from duotone import CacheSpec, Eviction, QuantizedCache, Sharing
from duotone.cache import StaticStore
from duotone.cache.index import STORES

from exactly import FP64, no_rounding
from families import IMAGE, exact_model, inputs, logit_error, tiny_model, typed

REPORTED = SPECS | {
    "shared": STREAM.replace(share=Sharing(key=1, value=0, layers=2, dominant=1)),
    "normalised": STREAM.replace(key_norm=True, sink=0, recent=1),
    "background": duotone.scheme("duotone-whole"),
    "evicting": duotone.scheme("vl-cache"),
}
ROWS = [[3, "image", 9, "image", 4], [11, "image", 2], [7]]
NEW = 14


@pytest.fixture
def exactly() -> Iterator[None]:
    with no_rounding():
        yield


def filled(spec: CacheSpec) -> QuantizedCache:
    """A cache after the prompt."""
    model = exact_model("internvl")
    cache = QuantizedCache(model, spec)
    with torch.no_grad():
        model(**typed(model, inputs("internvl", ROWS)), past_key_values=cache)
    return cache


def tokens(count: int, seed: int = 0) -> torch.Tensor:
    """Made-up answers, [3, count]."""
    return torch.randint(2, 280, (3, count), generator=torch.Generator().manual_seed(seed))


def bytes_of(store: StaticStore) -> int:
    """Bytes of all buffers, spare slots included."""
    pairs = [pair for name in STORES if (pair := getattr(store, name)) is not None]
    packed = sum(pair.codes_bytes + pair.params_bytes for pair in pairs)
    return packed + store.norm_bytes + store.key.nbytes + store.value.nbytes


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("policy", REPORTED)
def test_memory_is_what_it_is_without_but_for_spare_slots(policy: str) -> None:
    model = exact_model("internvl")
    growing, still = (filled(REPORTED[policy]) for _ in range(2))
    decode(model, growing, tokens(NEW))
    decode(model, still, tokens(NEW), room=NEW)
    ours, theirs, decoder = still.memory(), growing.memory(), still.timeline.frozen.decoder
    same = ("dense_equivalent_bytes", "visual_dense_equivalent_bytes", "nominal_bits")
    assert all(getattr(ours, name) == getattr(theirs, name) for name in same)
    parts = (ours.codes_bytes, ours.params_bytes, ours.dense_bytes)
    held = sum(map(bytes_of, decoder.stores))
    assert sum(parts) == held == ours.total_bytes - ours.index_bytes
    assert ours.codes_bytes >= theirs.codes_bytes
    packed = [pair for s in decoder.stores for pair in (s.visual, s.background) if pair]
    data = sum(pair.codes_bytes + pair.params_bytes for pair in packed)
    assert data <= ours.visual_bytes
    assert bool(data) == bool(ours.visual_bytes)
    still.timeline.thaw()
    assert still.memory().dense_equivalent_bytes == theirs.dense_equivalent_bytes


def test_layers_have_one_table_of_a_thawed_stream() -> None:
    """Moves that follow from a table are found once for all of them, and apart for K and V."""
    cache = filled(STREAM)
    decode(exact_model("internvl"), cache, tokens(NEW), room=NEW)
    cache.timeline.thaw()
    first, *others = (store.stream for store in cache.timeline.stores)
    assert others
    assert first.key.blocks is not first.value.blocks
    for which in ("key", "value"):
        table = getattr(first, which).blocks
        assert table.tokens
        assert all(getattr(stream, which).blocks is table for stream in others)


@pytest.mark.usefixtures("exactly")
def test_the_image_tokens_are_packed() -> None:
    """Comparisons would hold if no token were packed; here some must be."""
    cache = filled(VISUAL)
    packed = cache.timeline.hold_still(NEW).decoder.stores[0].places.visual
    assert packed.tolist() == (inputs("internvl", ROWS)["input_ids"] == IMAGE).sum(-1).tolist()


@pytest.mark.parametrize(
    ("name", "spec", "message"),
    [
        ("gemma3", MIXED.replace(evict=Eviction(0.5)), "evicts some"),
        ("llama", STREAM.replace(share=Sharing(key=0, layers=2, weights=(0.5, 0.5))), "average"),
    ],
    ids=["windows", "averaged"],
)
def test_refusals_come_before_anything_is_changed(name: str, spec: CacheSpec, message: str) -> None:
    model, given = tiny_model(name), inputs(name, [[9]])
    cache = QuantizedCache(model, spec)
    with torch.no_grad():
        model(**given, past_key_values=cache)
    before = cache.memory()
    with pytest.raises(ValueError, match=message):
        cache.timeline.hold_still(4)
    assert cache.memory() == before


def test_an_empty_cache_cannot_hold_still() -> None:
    with pytest.raises(ValueError, match="empty cache"):
        QuantizedCache(tiny_model("llama"), STREAM).timeline.hold_still(3)


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("policy", SPECS)
@pytest.mark.parametrize("room", [1, 7])
def test_more_tokens_than_there_is_room_for_do_not_pass(policy: str, room: int) -> None:
    cache = filled(SPECS[policy])
    step, length = HeldStill(exact_model("internvl"), cache, room), cache.length
    for ids in tokens(room).split(1, 1):
        step(ids)
    full = rf"have room for, {room} per sequence; got one more\. Hold the cache still with more"
    with pytest.raises(ValueError, match=full):
        step(tokens(1))
    assert cache.length == length + room


@pytest.mark.usefixtures("exactly")
@pytest.mark.parametrize("before", [0, 1, 9])
def test_a_deep_copy_goes_its_own_way(before: int) -> None:
    """Groups of 4 leave a window of 3: after nine tokens of an answer some have left."""
    model, cache = exact_model("internvl"), filled(STREAM)
    if before:
        decode(model, cache, tokens(before), room=NEW)
    clone, alone, other = copy.deepcopy(cache), filled(STREAM), filled(STREAM)
    for theirs in (alone, other):
        decode(model, theirs, tokens(before)) if before else None
    for ours, theirs, seed in ((clone, other, 7), (cache, alone, 8)):
        logits = [decode(model, x, tokens(5, seed), room) for x, room in ((ours, 5), (theirs, 0))]
        assert logit_error(*logits) < FP64
    clone.timeline.thaw()
    assert clone.memory().codes_bytes == other.memory().codes_bytes
