"""Dense tokens in 8-bit floats: the type itself, and what moves them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import duotone
from duotone import CacheSpec
from duotone.attention import attend
from duotone.cache import DenseSegment
from duotone.cache.dense_dtype import (
    FP8,
    LARGEST,
    ROWS,
    as_stored,
    channels_of,
    dense_dtype,
    kept_as,
    read_as,
)
from duotone.cache.ragged import Move
from duotone.cache.static import move_tokens

TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def wide_range(dtype: torch.dtype) -> torch.Tensor:
    """Rows [3, 2, 60, 16] with entries of all sizes that K and V have, and beyond."""
    spread = torch.logspace(-7, 4.5, 60, dtype=torch.float64)[:, None]
    x = torch.randn(3, 2, 60, 16, dtype=torch.float64) * spread
    x[..., 5] *= 100.0  # a channel with a bias
    x[0, 0, 0] = 0.0
    return x.clamp(-6e4, 6e4).to(dtype)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_number_is_kept_to_four_significant_bits_whatever_its_size(dtype: torch.dtype) -> None:
    x = wide_range(dtype)
    error = (read_as(kept_as(x, ROWS), torch.float64) - x.double()).abs()
    top = x.double().abs().amax(-1, keepdim=True)
    assert (error <= torch.maximum(x.double().abs() / 16, top * 2.0**-17)).all()
    assert x.double().abs().max() > 4e4
    # Without a scale, the same numbers would be cut off.
    plain = kept_as(x, FP8).double()
    assert ((plain - x.double()).abs() > 0.9 * x.double().abs()).any()


@given(st.floats(2.0**-90, 2.0**120, width=32))
def test_the_scale_is_the_least_that_cuts_nothing_off(top: float) -> None:
    row = kept_as(torch.tensor([top, -top / 3]), ROWS)
    scale = 2.0 ** (int(row[-1]) - 127)
    assert top <= LARGEST * scale
    assert top > LARGEST * scale / 2


def test_the_scale_is_exact_at_the_edges() -> None:
    numbers = [448.0, 449.0, 447.9, 896.0, 2.0**-6, 1.75, 1.7500001]
    rows = kept_as(torch.tensor(numbers)[:, None], ROWS)
    assert (rows[:, 1].int() - 127).tolist() == [0, 1, 0, 1, -14, -8, -7]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_second_round_trip_changes_nothing(dtype: torch.dtype) -> None:
    once = read_as(kept_as(wide_range(dtype), ROWS), dtype)
    assert torch.equal(read_as(kept_as(once, ROWS), dtype), once)


@pytest.mark.parametrize("dtype", TYPES[:3], ids=str)
def test_the_largest_numbers_of_a_type_stay_numbers(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    x = torch.tensor([[most, -most, 0.0], [1.0, most, 2.0]], dtype=dtype)
    read = read_as(kept_as(x, ROWS), dtype)
    assert read.isfinite().all()
    assert (read[x.abs() == most].double().abs() >= most * 15 / 16).all()


def test_no_number_stays_none_and_an_infinite_one_is_none() -> None:
    x = torch.tensor([[1.0, torch.inf], [torch.nan, 1.0], [3.0, 4.0], [-torch.inf, 448.0]])
    read = read_as(kept_as(x, ROWS), torch.float32)
    assert read.isnan().any(-1).tolist() == [True, True, False, True]
    assert read[2].tolist() == [3.0, 4.0]


def test_a_row_is_one_byte_per_number_and_one() -> None:
    x = torch.randn(2, 3, 0, 80)
    assert kept_as(x, ROWS).shape == (2, 3, 0, 81)
    rows = kept_as(torch.randn(5, 80), ROWS)
    assert (rows.nbytes, channels_of(rows), channels_of(x)) == (5 * 81, 80, 80)
    assert rows.nbytes == 5 * duotone.scheme("fp8").dense_row_bytes(80, 2)
    assert duotone.scheme("dense").dense_row_bytes(80, 2) == 160


def test_other_types_are_only_converted() -> None:
    x = torch.tensor([1e6], dtype=torch.bfloat16)
    assert torch.equal(kept_as(x, torch.bfloat16), x)
    assert torch.equal(read_as(x, torch.float32), x.float())
    rows = kept_as(x, ROWS)
    assert kept_as(rows, ROWS) is rows


def test_what_a_decode_step_reads_is_what_is_stored() -> None:
    x = torch.randn(2, 2, 3, 16, dtype=torch.float64)
    assert torch.equal(as_stored(x, duotone.scheme("kivi")), x)
    eight = as_stored(x, duotone.scheme("fp8"))
    assert torch.equal(eight, read_as(kept_as(x, ROWS), torch.float64))
    assert not torch.equal(eight, x)


def test_the_spec_says_which() -> None:
    assert dense_dtype(CacheSpec(), torch.float16) is torch.float16
    spec = CacheSpec(visual="dense", dense_dtype="float8_e4m3fn")
    assert dense_dtype(spec, torch.float16) is ROWS
    assert (CacheSpec(visual="dense").nominal_bits(3), spec.nominal_bits(3)) == (16.0, 8.0)
    assert (CacheSpec().dense_element_bytes(4), spec.dense_element_bytes(4)) == (4, 1)
    with pytest.raises(ValueError, match=r"dense_dtype must be one of .*got 'int8'"):
        CacheSpec(dense_dtype="int8")


@pytest.mark.parametrize("dtype", [ROWS, FP8], ids=str)
def test_moves_take_whole_tokens(dtype: torch.dtype) -> None:
    x = kept_as(torch.randn(2, 3, 5, 16), dtype)
    index = torch.tensor([[4, 0, 2], [1, 1, 3]])
    moved = Move(index, torch.tensor([3, 3])).apply(x)
    assert moved.dtype is dtype
    for b in range(2):
        assert torch.equal(moved[b].float(), x[b, :, index[b]].float())
    before = x.clone()
    full = torch.tensor([True, False])
    move_tokens(x, torch.tensor([[4], [4]]), torch.tensor([[0], [0]]), full)
    assert torch.equal(x[0, :, 0].float(), before[0, :, 4].float())
    assert torch.equal(x[1].float(), before[1].float())


@pytest.mark.parametrize("dtype", [ROWS, FP8], ids=str)
@pytest.mark.parametrize("tokens", [1, 63, 111])
def test_attention_reads_the_numbers_as_they_are(tokens: int, dtype: torch.dtype) -> None:
    query = torch.randn(2, 4, 1, 32)
    key, value = (kept_as(torch.randn(2, 2, tokens, 32) * 300, dtype) for _ in range(2))
    lengths = torch.tensor([tokens, (tokens + 1) // 2])
    segment = DenseSegment(key, value, lengths)
    wide = segment.widened(torch.float32)
    assert wide.widened(torch.float64) is wide
    ours, theirs = (attend(query, [kv], sm_scale=0.2) for kv in (segment, wide))
    assert torch.equal(ours, theirs)
