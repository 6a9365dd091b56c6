"""Streams of classes in records: what comes out again, and how they grow."""

from dataclasses import replace

import pytest
import torch
from class_streams import BATCH, GROUP, SPECS, STEPS, decode, numbers
from no_questions import NoQuestions

from duotone.attention.cuda.classes.format import format_of
from duotone.attention.cuda.classes.stream import ClassLayout, ClassStream
from duotone.cache import BlockTable, LayerStore, Ledger, StaticPlaces, StaticStore
from duotone.cache.packing import pack_tensor
from duotone.cache.pair import Layouts, PackedPair, StreamLayout
from duotone.cache.ragged import Move, concatenate
from duotone.cache.segments import PackedSegment
from duotone.quant import CacheSpec, KVSpec

from cases import SMALL, states

LENGTHS = (192, 128, 0)


def stream(name: str, lengths=LENGTHS, head_dim: int = 64, seed: int = 0) -> PackedPair:
    torch.manual_seed(seed)
    table = BlockTable(torch.tensor([[0, n] for n in lengths]))
    spec = SPECS[name]
    return PackedPair(
        *(
            pack_tensor(states(len(lengths), 2, max(lengths), head_dim).half(), tensor, table)
            for tensor in (spec.key, spec.value)
        )
    )


def assert_same_tokens(ours: PackedPair, theirs: PackedPair) -> None:
    """Compare numbers, codes and parameters, sequence by sequence."""
    for which in ("key", "value"):
        one, two = getattr(ours.canonical(), which), getattr(theirs.canonical(), which)
        assert torch.equal(one.blocks.offsets, two.blocks.offsets)
        assert set(one.tensor_names()) == set(two.tensor_names())
        groups = (two.blocks.sizes > 0).sum(-1).tolist()
        for b, n in enumerate(two.blocks.lengths.tolist()):
            assert torch.equal(one.dequantize()[b, :, :n], two.dequantize()[b, :, :n])
            assert torch.equal(one.codes[b, :, :n], two.codes[b, :, :n])
            for name in ("scale", "zero_point", "classes"):
                own, other = getattr(one, name), getattr(two, name)
                assert torch.equal(own[b, :, : groups[b]], other[b, :, : groups[b]])


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("name", SPECS)
def test_a_stream_comes_back_from_records(name: str, head_dim: int) -> None:
    if head_dim == 96 and name == "rotated":
        pytest.skip("no Hadamard matrix of 96")
    pair = stream(name, head_dim=head_dim)
    laid = pair.laid_out(ClassLayout())
    assert isinstance(laid.records, ClassStream)
    assert not laid.key.tensor_names()
    assert laid.records.data.shape[2] == 3
    assert_same_tokens(laid, pair)
    assert laid.codes_bytes + laid.params_bytes == laid.records.nbytes


def test_a_wrong_record_is_noticed() -> None:
    pair = stream("small")
    laid = pair.laid_out(ClassLayout())
    flipped = replace(laid.records, data=laid.records.data ^ 1)
    with pytest.raises(AssertionError):
        assert_same_tokens(replace(laid, records=flipped), pair)


@pytest.mark.parametrize("name", SPECS)
def test_groups_join_by_copying(name: str) -> None:
    first, more = (64, 128, 0), (128, 0, 64)
    pairs = [stream(name, lengths, seed=i) for i, lengths in enumerate((first, more))]
    join = concatenate(torch.tensor(first), torch.tensor(more), 128)
    plain = pairs[0].append(pairs[1], join)
    ours, theirs = (pair.laid_out(ClassLayout()) for pair in pairs)
    laid = ours.append(theirs, join)
    assert laid.records is not None
    assert torch.equal(laid.records.tokens, laid.value.blocks.offsets)
    assert_same_tokens(laid, plain)
    picked = torch.tensor([2, 0])
    assert_same_tokens(laid.rows(picked), plain.rows(picked))
    kept = torch.tensor([40, 128, 1])
    cut = laid.truncate(kept)
    assert_same_tokens(cut, plain.truncate(kept))
    assert ours.records.append(object(), ours.key.blocks, theirs.key.blocks) is None


def test_groups_join_a_group_that_was_cut() -> None:
    kept, more = torch.tensor([100, 64, 0]), (64, 64, 64)
    cut = stream("small").truncate(kept)
    new = stream("small", more, seed=1)
    join = concatenate(kept, torch.tensor(more), 100)
    laid = cut.laid_out(ClassLayout()).append(new.laid_out(ClassLayout()), join)
    assert_same_tokens(laid, cut.append(new, join))


@pytest.mark.parametrize("name", SPECS)
def test_a_buffer_takes_a_group_where_it_is_due(name: str) -> None:
    pair = stream(name, (128, 64, 0)).laid_out(ClassLayout())
    records = pair.records.widened(256)
    assert records.data.shape[2] == 4
    assert records.tokens.tolist() == [[0, 64, 128, 128, 128], [0, 64, 64, 64, 64], [0] * 5]
    dense = [states(3, 2, 100, 64).half() for _ in range(2)]
    index = torch.arange(GROUP).expand(3, -1) + torch.tensor([[0], [7], [30]])
    leaving, full = Move(index, torch.full((3,), GROUP)), torch.tensor([True, False, True])
    records.write(tuple(dense), leaving, full, torch.tensor([128, 64, 0]), None, SPECS[name])
    assert records.tokens.tolist() == [[0, 64, 128, 192, 192], [0, 64, 64, 64, 64], [0, *[64] * 4]]
    table = BlockTable(torch.tensor([[0, GROUP]] * 3))
    both = zip(dense, (SPECS[name].key, SPECS[name].value), strict=True)
    new = PackedPair(*(pack_tensor(leaving.apply(x), s, table) for x, s in both))
    alone, old = new.laid_out(ClassLayout()).records.by_head, pair.records.by_head
    for part, kept in records.by_head.items():
        assert torch.equal(kept[0, :, 2], alone[part][0, :, 0])
        assert torch.equal(kept[2, :, 0], alone[part][2, :, 0])
        assert torch.equal(kept[0, :, :2], old[part][0])
        assert torch.equal(kept[1, :, 0], old[part][1, :, 0])
    assert records.widened(64).tokens.tolist() == [[0, 64], [0, 64], [0, 64]]


def test_an_empty_stream_has_room() -> None:
    layout, spec, cpu = ClassLayout(), SPECS["small"], torch.device("cpu")
    assert isinstance(layout, StreamLayout)
    records = layout.empty(spec, (2, 3), (64, 64), cpu)
    assert records.data.shape[:3] == (2, 3, 0)
    wide = records.widened(128)
    assert wide.data.shape[:3] == (2, 3, 2)
    assert wide.tokens.tolist() == [[0, 0, 0]] * 2
    assert layout.empty(KVSpec(*SMALL), (2, 3), (64, 64), cpu) is None
    assert layout.empty(spec, (2, 3), (64, 32), cpu) is None


def test_layers_that_share_codes_have_no_stream_of_classes() -> None:
    layout = ClassLayout().sharing(["key"], ())
    pair = stream("small")
    assert isinstance(layout, StreamLayout)
    assert layout.sharing((), ()) is layout
    assert layout(pair.key, pair.value) is None
    assert layout.empty(SPECS["small"], (2, 3), (64, 64), torch.device("cpu")) is None
    with pytest.raises(ValueError, match="share no codes"):
        pair.laid_out(ClassLayout()).records.with_codes("key", None)


def test_k_stays_outside_of_tiles() -> None:
    form = format_of(SPECS["small"].key, SPECS["small"].value, (128, 128))
    assert not form.key_in_tiles
    assert format_of(*(x.replace(group=None) for x in (SMALL[0], SMALL[1])), (128, 128)) == form


LAYOUTS = Layouts(stream=ClassLayout())


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", ["min/max", "rotated"])
def test_attention_sees_the_same(name: str, static: bool) -> None:
    plain, expected = decode(name, None, static)
    laid, found = decode(name, LAYOUTS, static)
    (segment,) = (x for x in laid if isinstance(x, PackedSegment))
    assert isinstance(segment.records, ClassStream)
    assert plain[0].records is None
    assert torch.equal(segment.lengths, plain[0].lengths)
    assert torch.equal(segment.records.tokens[:, -1], segment.lengths)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["small", "rotated"])
def test_a_flush_asks_the_host_nothing(name: str) -> None:
    torch.manual_seed(0)
    spec = CacheSpec(visual="text", text=SPECS[name], recent=32)
    real = torch.ones(len(BATCH), 160, dtype=torch.bool)
    ledger = Ledger(spec, len(BATCH), torch.device("cpu"))
    layer = LayerStore(spec, LAYOUTS)
    layer.apply(ledger.plan(torch.zeros_like(real), real), *numbers(160))
    store = StaticStore(layer, *StaticPlaces.of(ledger.state, spec, STEPS))
    before = store.stream.records.data.clone()
    full = torch.tensor([True, False, True])
    store.flush(full)  # as one before every capture
    for window in (store.key, store.value):
        window.normal_()
    with NoQuestions() as watch:
        store.flush(full)
    assert watch.seen > 20
    assert (store.stream.records.data != before).flatten(1).any(1).tolist() == full.tolist()
