"""Dense tokens in 8-bit floats: the type itself, and what moves them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duotone import CacheSpec
from duotone.attention import attend
from duotone.cache import DenseSegment
from duotone.cache.eight_bit import FP8, LARGEST, dense_dtype, kept_as
from duotone.cache.ragged import Move
from duotone.cache.static import move_tokens

SMALLEST_NORMAL = 2.0**-6


@given(st.floats(-LARGEST, LARGEST, width=32))
def test_a_number_is_kept_to_four_significant_bits(x: float) -> None:
    kept = float(kept_as(torch.tensor([x]), FP8).float())
    assert abs(kept - x) <= max(abs(x) / 16, SMALLEST_NORMAL / 16)


def test_what_is_too_large_is_cut_off_and_no_number_stays_none() -> None:
    given_ = torch.tensor([449.0, -1e9, torch.inf, torch.nan, 448.0])
    kept = kept_as(given_, FP8).float()
    assert kept[[0, 1, 2, 4]].tolist() == [448.0, -448.0, 448.0, 448.0]
    assert kept[3].isnan()


def test_other_types_are_only_converted() -> None:
    x = torch.tensor([1e6], dtype=torch.bfloat16)
    assert torch.equal(kept_as(x, torch.bfloat16), x)
    eight = kept_as(x, FP8)
    assert kept_as(eight, FP8) is eight


def test_the_spec_says_which() -> None:
    assert dense_dtype(CacheSpec(), torch.float16) is torch.float16
    spec = CacheSpec(visual="dense", dense_dtype="float8_e4m3fn")
    assert dense_dtype(spec, torch.float16) is FP8
    assert (CacheSpec(visual="dense").nominal_bits(3), spec.nominal_bits(3)) == (16.0, 8.0)
    assert (CacheSpec().dense_element_bytes(4), spec.dense_element_bytes(4)) == (4, 1)
    with pytest.raises(ValueError, match=r"dense_dtype must be one of .*got 'int8'"):
        CacheSpec(dense_dtype="int8")


def test_moves_take_whole_tokens() -> None:
    x = kept_as(torch.randn(2, 3, 5, 16), FP8)
    index = torch.tensor([[4, 0, 2], [1, 1, 3]])
    moved = Move(index, torch.tensor([3, 3])).apply(x)
    assert moved.dtype is FP8
    for b in range(2):
        assert torch.equal(moved[b].float(), x[b, :, index[b]].float())
    before = x.clone()
    full = torch.tensor([True, False])
    move_tokens(x, torch.tensor([[4], [4]]), torch.tensor([[0], [0]]), full)
    assert torch.equal(x[0, :, 0].float(), before[0, :, 4].float())
    assert torch.equal(x[1].float(), before[1].float())


@pytest.mark.parametrize("tokens", [1, 63, 111])
def test_attention_reads_the_numbers_as_they_are(tokens: int) -> None:
    query = torch.randn(2, 4, 1, 32)
    key, value = (kept_as(torch.randn(2, 2, tokens, 32), FP8) for _ in range(2))
    lengths = torch.tensor([tokens, (tokens + 1) // 2])
    segment = DenseSegment(key, value, lengths)
    wide = segment.widened(torch.float32)
    assert wide.widened(torch.float64) is wide
    ours, theirs = (attend(query, [kv], sm_scale=0.2) for kv in (segment, wide))
    assert torch.equal(ours, theirs)
