"""Streams in group records: what comes out again, and how they grow, against canonical packing."""

from dataclasses import replace

import pytest
import torch
from group_specs import CASES
from run_cases import KEEPS, completed, of_run

from duotone.attention.cuda.groups.format import TILE, format_of
from duotone.attention.cuda.groups.records import GroupLayout
from duotone.attention.refused import RefusedError
from duotone.cache import BlockTable
from duotone.cache.packing import pack_tensor
from duotone.cache.pair import PackedPair
from duotone.cache.ragged import Move, concatenate
from duotone.quant import KVSpec, TensorSpec

from cases import poisoned, states

LENGTHS = (160, 96, 0)


def stream(name: str, lengths=LENGTHS, head_dim: int = 64, seed: int = 0) -> PackedPair:
    torch.manual_seed(seed)
    table = BlockTable(torch.tensor([[0, n] for n in lengths]))
    made = []
    for spec in CASES[name]:
        x = states(len(lengths), 2, max(lengths), head_dim).half()
        made.append(pack_tensor(x, spec, table))
    return PackedPair(*made)


def assert_same_tokens(ours: PackedPair, theirs: PackedPair) -> None:
    """Compare numbers and their canonical bits, sequence by sequence."""
    for which in ("key", "value"):
        one, two = getattr(ours.canonical(), which), getattr(theirs.canonical(), which)
        assert torch.equal(one.blocks.offsets, two.blocks.offsets)
        assert set(one.tensor_names()) == set(two.tensor_names())
        assert all(getattr(one, n).shape == getattr(two, n).shape for n in two.tensor_names())
        for b, n in enumerate(two.blocks.lengths.tolist()):
            assert torch.equal(one.dequantize()[b, :, :n], two.dequantize()[b, :, :n])
            assert torch.equal(one.codes[b, :, :n], two.codes[b, :, :n])


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("name", CASES)
def test_a_stream_comes_back_from_records(name: str, head_dim: int) -> None:
    if head_dim == 96 and "wide" in name:
        pytest.skip("64 does not divide 96")
    pair = stream(name, head_dim=head_dim)
    laid = pair.laid_out(GroupLayout())
    assert laid.records.shape == (3, 2)
    assert not laid.key.tensor_names()
    assert_same_tokens(laid, pair)
    assert laid.codes_bytes + laid.params_bytes == laid.records.data.nbytes
    # A hybrid's modes are the sign bits of its scales; a plane of signs stands beside the scales.
    modes = sum(x.symmetric.nbytes for x in (pair.key, pair.value) if x.symmetric is not None)
    assert laid.params_bytes >= pair.params_bytes - modes


def test_a_wrong_record_is_noticed() -> None:
    pair = stream("kivi")
    laid = pair.laid_out(GroupLayout())
    flipped = replace(laid.records, data=laid.records.data ^ 1)
    with pytest.raises(AssertionError):
        assert_same_tokens(replace(laid, records=flipped), pair)


@pytest.mark.parametrize("name", CASES)
def test_what_joins_is_copied_behind(name: str) -> None:
    first, more = (64, 128, 0), (64, 0, 128)
    pairs = [stream(name, lengths, seed=i) for i, lengths in enumerate((first, more))]
    join = concatenate(torch.tensor(first), torch.tensor(more), 128)
    plain = pairs[0].append(pairs[1], join)
    ours, theirs = (pair.laid_out(GroupLayout()) for pair in pairs)
    laid = ours.append(theirs, join)
    assert laid.records is not None
    assert_same_tokens(laid, plain)
    picked = torch.tensor([2, 0])
    assert_same_tokens(laid.rows(picked), plain.rows(picked))
    kept = torch.tensor([40, 128, 1])
    assert_same_tokens(laid.truncate(kept), plain.truncate(kept))


def test_behind_a_group_that_was_cut_nothing_is_copied() -> None:
    pair, more = stream("kivi"), stream("kivi", (32, 32, 32), seed=1)
    cut = pair.truncate(torch.tensor([40, 96, 0])).laid_out(GroupLayout())
    assert cut.records is not None
    join = concatenate(torch.tensor([40, 96, 0]), torch.tensor([32, 32, 32]), 96)
    joined = cut.append(more.laid_out(GroupLayout()), join)
    assert joined.records is None
    # A group begins at token 40, which no tile does.
    assert joined.laid_out(GroupLayout()).records is None


@pytest.mark.parametrize("name", CASES)
def test_a_buffer_takes_whole_groups_where_they_are_due(name: str) -> None:
    group = 64 if name in ("wide-groups", "mixed-bits") else 32
    spec, layout = KVSpec(*CASES[name]), GroupLayout()
    pair = stream(name, (128, 64, 0)).laid_out(layout)
    records = pair.records.widened(256)
    dense = [states(3, 2, 100, 64).half() for _ in range(2)]
    index = torch.arange(group).expand(3, -1) + torch.tensor([[0], [7], [30]])
    leaving, full = Move(index, torch.full((3,), group)), torch.tensor([True, False, True])
    records.write(tuple(dense), leaving, full, torch.tensor([128, 64, 0]), None, spec)
    table = BlockTable(torch.tensor([[0, group]] * 3))
    new = PackedPair(
        *(pack_tensor(leaving.apply(x), s, table) for x, s in zip(dense, CASES[name], strict=True))
    )
    alone = new.laid_out(layout).records.tiles[:, :, : group // TILE]
    assert torch.equal(records.tiles[0, :, 4 : 4 + group // TILE], alone[0])
    assert torch.equal(records.tiles[2, :, : group // TILE], alone[2])
    assert torch.equal(records.tiles[0, :, :4], pair.records.tiles[0, :, :4])
    before = pair.records.widened(256).tiles[1]
    assert torch.equal(records.tiles[1], before)


def test_an_empty_stream_has_room() -> None:
    spec = KVSpec(*CASES["kivi"])
    records = GroupLayout().empty(spec, (2, 3), (64, 64), torch.device("cpu"))
    assert records.nbytes == 0
    assert records.widened(70).tiles.shape[:3] == (2, 3, 4)
    assert GroupLayout().empty(spec, (2, 3), (64, 32), torch.device("cpu")) is None


def test_what_streams_need_has_a_reason() -> None:
    key, value = CASES["kivi"]
    dims = (64, 64)
    format_of(key, value, dims)
    with pytest.raises(RefusedError, match="rotate"):
        format_of(key, value.replace(transform="hadamard"), dims)
    with pytest.raises(RefusedError, match="groups along tokens"):
        format_of(TensorSpec(2), value, dims)
    # Both along channels: tokens leave the window one by one.
    both = KVSpec(value, value)
    with pytest.raises(RefusedError, match="groups along tokens in K or V"):
        format_of(both.key, both.value, dims)
    assert GroupLayout().empty(both, (2, 3), (64, 64), torch.device("cpu")) is None
    key, value = CASES["kivi"]
    wide = KVSpec(key, value.replace(group=32))
    assert GroupLayout().empty(wide, (1, 1), (288, 288), torch.device("cpu")) is None


@pytest.mark.parametrize("name", CASES)
def test_a_stream_without_tokens_is_laid_out(name: str) -> None:
    pair = stream(name).truncate(torch.tensor([0, 0, 0]))
    laid = pair.laid_out(GroupLayout())
    assert laid.records is not None
    assert_same_tokens(laid, pair)


def test_poison_behind_a_stream_does_not_enter_records() -> None:
    from duotone.cache.segments import PackedSegment

    pair = stream("kivi")
    segment = PackedSegment(pair.key, pair.value, pair.key.blocks.lengths)
    (poison,) = poisoned([segment])
    laid = PackedPair(poison.key, poison.value).laid_out(GroupLayout())
    plain = pair.laid_out(GroupLayout())
    params = laid.records.tiles[..., sum(laid.records.format.part_bytes[:2]) :]
    assert torch.equal(params, plain.records.tiles[..., -params.shape[-1] :])


ASYMMETRIC = [
    name for name, specs in CASES.items() if all(x.mapping == "asymmetric" for x in specs)
]


@pytest.mark.parametrize("parts", KEEPS.values(), ids=KEEPS)
@pytest.mark.parametrize("name", ASYMMETRIC)
def test_codes_that_lie_apart_are_held_once(name: str, parts: tuple[str, ...]) -> None:
    pair, whole = stream(name), stream(name).laid_out(GroupLayout())
    keeps, reads = of_run(pair, parts)
    for laid in (keeps, reads):
        assert laid.records is not None
        assert laid.params_bytes == whole.params_bytes
        assert laid.codes_bytes + laid.params_bytes == sum(x.nbytes for x in laid.records.buffers)
    assert_same_tokens(keeps, pair)
    canonical = reads.canonical()
    for which in ("key", "value"):
        assert (getattr(canonical, which).codes is None) == (which in parts)
    full = completed(reads, keeps, parts)
    assert_same_tokens(full, pair)
    for which in parts:
        assert full.records.codes[which == "value"] is keeps.records.codes[which == "value"]
    # What is not shared stays where it was.
    if parts == KEEPS["k"]:
        codes = whole.records.format.part_bytes[0]
        assert torch.equal(reads.records.tiles, whole.records.tiles[..., codes:])


@pytest.mark.parametrize("parts", KEEPS.values(), ids=KEEPS)
def test_wrong_codes_of_another_layer_are_noticed(parts: tuple[str, ...]) -> None:
    pair = stream("kivi")
    keeps, reads = of_run(pair, parts)
    name = f"{parts[-1]}_codes"
    flipped = replace(keeps.records, **{name: getattr(keeps.records, name) ^ 1})
    with pytest.raises(AssertionError):
        assert_same_tokens(completed(reads, replace(keeps, records=flipped), parts), pair)


@pytest.mark.parametrize("parts", KEEPS.values(), ids=KEEPS)
@pytest.mark.parametrize("name", ASYMMETRIC)
def test_streams_of_a_run_grow_alike(name: str, parts: tuple[str, ...]) -> None:
    first, more = (64, 128, 0), (64, 0, 128)
    pairs = [stream(name, lengths, seed=i) for i, lengths in enumerate((first, more))]
    join = concatenate(torch.tensor(first), torch.tensor(more), 128)
    plain = pairs[0].append(pairs[1], join)
    olds, news = (of_run(pair, parts) for pair in pairs)
    keeps, reads = (old.append(new, join) for old, new in zip(olds, news, strict=True))
    assert reads.records is not None
    assert_same_tokens(completed(reads, keeps, parts), plain)
    # One of both may have given the kernel's order up.
    assert_same_tokens(completed(reads.canonical(), keeps, parts), plain)
    assert_same_tokens(completed(reads, keeps.canonical(), parts), plain)
    picked = torch.tensor([2, 0])
    keeps, reads = keeps.rows(picked), reads.rows(picked)
    assert_same_tokens(completed(reads, keeps, parts), plain.rows(picked))
    kept = torch.tensor([40, 1])
    keeps, reads = keeps.truncate(kept), reads.truncate(kept)
    assert keeps.records is None
    assert_same_tokens(completed(reads, keeps, parts), plain.rows(picked).truncate(kept))


@pytest.mark.parametrize("parts", KEEPS.values(), ids=KEEPS)
def test_a_reader_writes_its_scales_alone(parts: tuple[str, ...]) -> None:
    spec, pair = KVSpec(*CASES["kivi"]), stream("kivi", (128, 64, 0))
    keeps, reads = (x.records.widened(256) for x in of_run(pair, parts))
    whole = pair.laid_out(GroupLayout()).records.widened(256)
    dense = tuple(states(3, 2, 100, 64).half() for _ in range(2))
    leaving = Move(torch.arange(64).expand(3, -1), torch.full((3,), 64))
    full, where = torch.tensor([True, False, True]), torch.tensor([128, 64, 0])
    for records in (keeps, reads, whole):
        before = [x.clone() for x in records.buffers]
        records.write(dense, leaving, full, where, None, spec)
        for old, new in zip(before, records.buffers, strict=True):
            assert (old != new).flatten(1).any(1).tolist() == full.tolist()
    assert torch.equal(keeps.tiles, reads.tiles)
    blank = stream("kivi", (192, 64, 64)).laid_out(GroupLayout())
    for which in parts:
        reads = reads.with_codes(which, keeps)
    ours, theirs = (x.canonical(blank.key, blank.value) for x in (reads, whole))
    assert_same_tokens(PackedPair(*ours), PackedPair(*theirs))


def test_groups_with_signs_do_not_share_codes() -> None:
    pair = stream("mixed-bits")  # K is a hybrid
    assert pair.laid_out(GroupLayout().sharing((), ())).records is not None
    assert pair.laid_out(GroupLayout().sharing(("value",), ())).records is not None
    assert pair.laid_out(GroupLayout().sharing(("key",), ())).records is None
    spec, shape = KVSpec(*CASES["mixed-bits"]), ((1, 1), (64, 64), torch.device("cpu"))
    assert GroupLayout().sharing((), ("key",)).empty(spec, *shape) is None
