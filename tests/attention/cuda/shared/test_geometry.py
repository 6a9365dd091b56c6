"""Decode launches are cut into warps, units of a multiprocessor, splits and sub-blocks."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import duotone
from duotone.attention.cuda.classes import decode as class_decode
from duotone.attention.cuda.classes.format import ClassFormat
from duotone.attention.cuda.dense import decode as dense_decode
from duotone.attention.cuda.groups import decode as group_decode
from duotone.attention.cuda.groups.format import GroupFormat, Operand
from duotone.attention.cuda.shared.geometry import (
    RING_BYTES,
    VARIABLES_BYTES,
    Geometry,
    in_sub_blocks,
)
from duotone.attention.cuda.shared.work import inverse_of
from duotone.attention.cuda.spans import decode as span_decode
from duotone.attention.cuda.spans.layout import RecordFormat


@pytest.mark.parametrize("heads", [560, 800, 1848, 3816])
def test_short_windows_of_many_heads_are_not_split(heads) -> None:
    form = dense_decode.DenseFormat(128)
    assert dense_decode.geometry(form, heads, 11, 132) == Geometry(2, 6, 1)
    assert dense_decode.geometry(form, 560, 600, 132).splits > 1


@pytest.mark.parametrize(
    ("heads", "records", "at"),
    [
        (256, 256, Geometry(8, 2, 1)),
        (512, 16, Geometry(4, 4, 1)),
        (560, 16, Geometry(2, 8, 1)),
        (3816, 16, Geometry(1, 16, 1)),
        (1200, 104, Geometry(8, 2, 1)),
    ],
    ids=["long", "no more than places", "short", "many", "not so short"],
)
def test_short_streams_of_many_heads_have_fewer_warps(heads, records, at) -> None:
    operand = Operand(2, False, 32, False)
    form = GroupFormat(128, operand, operand)
    assert group_decode.geometry(form, 4, heads, records, 132, RING_BYTES) == at


@pytest.mark.parametrize(
    ("bits", "batch", "tokens", "at"),
    [
        (1, 8, 8192, Geometry(8, 2, 2)),
        (1, 1, 131072, Geometry(16, 1, 16)),
        (2, 1, 131072, Geometry(16, 1, 16)),
        (1, 32, 8192, Geometry(8, 2, 1, sub_blocks=2)),
        (2, 32, 8192, Geometry(8, 2, 1, sub_blocks=2)),
        (1, 8, 32768, Geometry(16, 1, 2)),
        (1, 64, 3328, Geometry(4, 4, 1, sub_blocks=4)),
        (1, 477, 3328, Geometry(2, 8, 1)),
        (1, 477, 8192, Geometry(4, 4, 1)),
    ],
)
def test_short_launches_have_fewer_warps_and_single_waves_as_sub_blocks(
    bits, batch, tokens, at
) -> None:
    form = RecordFormat(128, bits, bits)
    given = (form, 4, 8 * batch, tokens // form.tokens, 132, RING_BYTES)
    assert span_decode.geometry(*given, kv_heads=8) == at
    # Teams are kv heads of one sequence.
    for kv_heads in (1, 3):
        assert span_decode.geometry(*given, kv_heads=kv_heads) == replace(at, sub_blocks=1)


GROUPED_KEY = duotone.scheme("duotone-whole").visual.key
SPANNED_KEY = GROUPED_KEY.replace(group=None)


@pytest.mark.parametrize(
    ("key", "batch", "tokens", "at"),
    [
        (GROUPED_KEY, 32, 8192, Geometry(8, 2, 1, sub_blocks=2)),
        (GROUPED_KEY, 64, 3328, Geometry(4, 4, 1, sub_blocks=4)),
        (GROUPED_KEY, 477, 3328, Geometry(4, 4, 1)),
        (SPANNED_KEY, 32, 8192, Geometry(8, 2, 1)),
    ],
    ids=["two", "four", "several waves", "none where K is a span's"],
)
def test_sub_blocks_of_channel_classes(key, batch, tokens, at) -> None:
    form = ClassFormat.of(key, duotone.scheme("duotone-whole").visual.value, 128)
    given = (form, 4, 8 * batch, tokens // form.tokens, 132, RING_BYTES)
    assert class_decode.geometry(*given, kv_heads=8) == at


def test_sub_blocks_share_what_the_variables_of_a_block_may_take() -> None:
    at = Geometry(4, 4, 1)
    assert in_sub_blocks(at, 8, 8, 132, VARIABLES_BYTES // 4) == replace(at, sub_blocks=4)
    assert in_sub_blocks(at, 8, 8, 132, VARIABLES_BYTES // 4 + 1) == at


@pytest.mark.parametrize(("bits", "under_way"), [((1, 1), 1), ((1, 2), 2), ((4, 4), 2)])
def test_with_one_bit_a_second_record_under_way_gains_nothing(bits, under_way) -> None:
    assert span_decode.records_in_flight(RecordFormat(128, *bits)) == under_way


@pytest.mark.parametrize(
    ("form", "group", "batch", "ring_kib", "calibrate", "warps"),
    [
        (RecordFormat(128, 1, 1), 6, 315, 208, False, 12),
        (RecordFormat(112, 1, 2), 8, 315, 144, False, 12),
        (RecordFormat(128, 1, 1), 6, 315, 80, False, 4),
        (RecordFormat(128, 1, 1), 6, 315, 208, True, 8),
        (RecordFormat(128, 1, 1), 6, 16, 208, False, 8),
        (RecordFormat(128, 4, 1), 6, 315, 208, False, 8),
        (RecordFormat(256, 1, 1), 6, 315, 208, False, 8),
        (RecordFormat(128, 1, 1), 9, 315, 208, False, 8),
        (RecordFormat(128, 1, 1), 4, 315, 208, False, 16),
    ],
)
def test_long_launches_with_two_tiles_of_heads_have_12_warps(
    form, group, batch, ring_kib, calibrate, warps
) -> None:
    heads, records = 8 * batch, -(-3328 // form.tokens)
    at = span_decode.geometry(form, group, heads, records, 132, ring_kib << 10, calibrate)
    assert at.warps * at.per_sm == warps


@pytest.mark.parametrize(
    ("batch", "tokens", "at"),
    [
        (315, 3328, Geometry(2, 6, 1)),
        (203, 3328, Geometry(2, 6, 1)),
        (187, 8192, Geometry(2, 6, 1)),
        (200, 32769, Geometry(2, 6, 2)),
        (80, 3328, Geometry(2, 6, 1)),
        (100, 3328, Geometry(4, 3, 1)),
    ],
)
def test_12_warps_are_blocks_of_two_where_kv_heads_are_many(batch, tokens, at) -> None:
    form = RecordFormat(128, 1, 1)
    records = -(-tokens // form.tokens)
    assert span_decode.geometry(form, 6, 8 * batch, records, 132, RING_BYTES) == at


@given(st.integers(2, 4096), st.data())
def test_a_division_by_splits_is_a_product(splits, data) -> None:
    x = data.draw(st.integers(0, 2**32 // splits - 1))
    assert (x * inverse_of(splits)) >> 32 == x // splits
