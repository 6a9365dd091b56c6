"""Tiles of a record by the lengths of spans."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import duotone
from duotone.attention.cuda.classes.format import ClassFormat
from duotone.attention.cuda.classes.layout import class_layout
from duotone.attention.cuda.shared.filling import filled_tiles, fitted, has_records
from duotone.attention.cuda.shared.slots import record_slots
from duotone.attention.cuda.spans import decode as span_decode
from duotone.attention.cuda.spans.layout import RecordFormat, span_layout
from duotone.cache import BlockTable, pack_tensor
from duotone.quant import TensorSpec

# Tiles of 896 and 1,024 bytes: with and without room for sums in a ring of single tiles.
BACK = duotone.scheme("duotone", bits=1).background
FOUR = ClassFormat.of(BACK.key, BACK.value, 64)
SUMS = RecordFormat(64, 1, 1)


def table(*spans: int) -> BlockTable:
    return BlockTable(torch.tensor([[0, *spans]]).cumsum(-1))


@pytest.mark.parametrize(
    ("spans", "tiles"),
    [
        ((256,), 4),
        ((128,), 2),
        ((64,), 1),
        ((65,), 2),
        ((3328,), 4),
        ((2112,), 2),  # 33 tiles, 34 or 36
        ((300, 300), 1),
        ((256, 192), 1),  # 7 tiles or 8
        ((4096, 1), 2),  # 65 tiles, 66 or 68
        ((0,), 4),
    ],
)
def test_records_are_no_larger_than_spans_fill(spans, tiles) -> None:
    assert fitted(FOUR, table(*spans)).tiles == tiles


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 256])
def test_span_records_have_room_for_the_sums_of_all_groups(head_dim) -> None:
    for bits in itertools.product((1, 2, 3, 4, 8), repeat=2):
        form = RecordFormat(head_dim, *bits)
        short = fitted(form, table(64))
        for group in range(1, 17):
            warps = [span_decode.warps_of(x, group) for x in (short, form)]
            assert bool(warps[0]) == bool(warps[1]), (bits, group)
        # Where K and V are read apart.
        rings = [x.stages * x.tiles * 8 * form.channels * max(bits) for x in (short, form)]
        assert rings[0] >= 16 * 2 * (form.channels + 8) or rings[0] == rings[1], bits


def test_span_records_are_halved_as_far_as_sums_let_them() -> None:
    assert [fitted(SUMS, table(n)).tiles for n in (256, 128, 64)] == [4, 2, 2]


@pytest.mark.parametrize(
    ("spans", "classes", "uniform"),
    [
        ((64,), True, False),
        ((64,) * 12, True, False),
        ((57, 64), True, False),
        ((56,), False, False),  # 64 is more than 9/8 of it
        ((65,), False, False),
        ((80,) * 4, False, False),
        ((95, 97), True, True),
        ((97,), True, True),
        ((0,), False, False),
        ((128, 0), True, True),
    ],
)
def test_short_spans_have_records_that_they_fill(spans, classes, uniform) -> None:
    """A record of 1 bit has two tiles at least; half of each would be filled up."""
    assert has_records(FOUR, table(*spans)) is classes
    assert has_records(SUMS, table(*spans)) is uniform


def test_the_longest_sequence_decides() -> None:
    spans = BlockTable(torch.tensor([[0, 4096], [0, 64]]))
    assert filled_tiles(spans, 64)[4] == 64
    assert fitted(FOUR, spans) is FOUR


def test_a_table_without_blocks_fills_nothing() -> None:
    assert filled_tiles(BlockTable(torch.zeros(0, 1, dtype=torch.long)), 64)[8] == 0


@given(st.lists(st.integers(0, 700), min_size=1, max_size=5))
def test_filling_is_within_its_share_and_larger_records_would_exceed_it(spans) -> None:
    blocks = table(*spans)
    form = fitted(FOUR, blocks)
    token, _ = record_slots(blocks, form.tokens)
    least = sum(-(-n // 64) for n in spans)
    assert token.shape[1] // 64 <= least * 33 / 32
    if form.tiles < FOUR.tiles:
        larger, _ = record_slots(blocks, 2 * form.tokens)
        assert larger.shape[1] // 64 > least * 33 / 32


@pytest.mark.parametrize(("tokens", "bits"), [(256, 1.3), (3328, 1.15)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_records_of_duotone_hold_little_more_than_a_bit(head_dim, tokens, bits) -> None:
    """Codes and parameters of both parts, of the tokens in front .37, to the nearest 64."""
    spec = duotone.scheme("duotone", bits=1)
    front = round(tokens * spec.foreground / spec.foreground_multiple) * spec.foreground_multiple
    nbytes = 0
    for kv, n in ((spec.visual, front), (spec.background, tokens - front)):
        x = torch.randn(2, 1, 1, n, head_dim)
        key, value = (
            pack_tensor(t, s, table(n)) for t, s in zip(x, (kv.key, kv.value), strict=True)
        )
        records = class_layout(key, value)
        canonical = sum(x.codes_bytes + x.params_bytes for x in (key, value))
        nbytes += records.nbytes if records else canonical
    assert nbytes * 8 / (2 * tokens * head_dim) < bits


def test_layouts_fit_their_records_and_give_all_back() -> None:
    torch.manual_seed(0)
    blocks = table(150, 300)
    for spec, layout in (
        (TensorSpec(2), span_layout),
        (TensorSpec(classes=((1, 1 / 2),)), class_layout),
    ):
        key, value = (pack_tensor(torch.randn(1, 2, 450, 64), spec, blocks) for _ in range(2))
        records = layout(key, value)
        assert records.format.tiles == 1
        back = records.canonical(*(records.left(key, value)))
        for ours, theirs in zip(back, (key, value), strict=True):
            assert torch.equal(ours.codes, theirs.codes)


def test_formats_have_as_many_tiles_as_a_copy_wants() -> None:
    assert (FOUR.tiles, SUMS.tiles, RecordFormat(128, 4, 4).tiles) == (4, 4, 1)
    few = TensorSpec(classes=((1, 1 / 8),))
    assert ClassFormat.of(few.replace(group=64), few, 64).tiles == 8
