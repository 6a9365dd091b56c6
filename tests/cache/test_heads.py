"""Heads of several layers side by side."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from duotone.cache import BlockTable, pack_tensor
from duotone.cache.heads import form_of_pair, join_heads, join_pairs, split_heads, split_pair
from duotone.cache.pair import PackedPair
from duotone.quant import TensorSpec


def pair(heads: int, seed: int, tokens: int = 7) -> PackedPair:
    torch.manual_seed(seed)
    table = BlockTable(torch.tensor([[0, tokens], [0, 4]]))
    specs = (TensorSpec(2), TensorSpec(4, "channels", 8))
    return PackedPair(*(pack_tensor(torch.randn(2, heads, tokens, 8), s, table) for s in specs))


def alike(one: PackedPair | None, other: PackedPair | None) -> bool:
    return form_of_pair(one) == form_of_pair(other)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 5))
def test_parts_are_contiguous_and_join_again(batch: int, layers: int, heads: int) -> None:
    x = torch.arange(batch * layers * heads * 6).view(batch, layers * heads, 3, 2)
    parts = split_heads(x, layers)
    for number, part in enumerate(parts):
        assert torch.equal(part, x[:, number * heads : (number + 1) * heads])
        assert part.stride() == torch.empty(part.shape).stride()
    assert torch.equal(join_heads(parts), x)


def test_parts_of_one_sequence_are_no_copies() -> None:
    x = torch.zeros(1, 6, 3, 2)
    assert all(part.untyped_storage().data_ptr() == x.data_ptr() for part in split_heads(x, 3))


def test_pairs_join_and_are_split_again() -> None:
    pairs = [pair(2, seed) for seed in range(3)]
    joined = join_pairs(pairs)
    assert joined.key.codes.shape[1] == 6
    for found, right in zip(split_pair(joined, 3), pairs, strict=True):
        assert alike(found, right)
        for name in ("key", "value"):
            one, other = getattr(found, name).by_head, getattr(right, name).by_head
            assert one.keys() == other.keys()
            assert all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize(
    "other", [None, pair(3, 0), pair(2, 0, tokens=8)], ids=["none", "heads", "tokens"]
)
def test_pairs_of_other_shapes_are_not_alike(other: PackedPair | None) -> None:
    assert alike(pair(2, 0), pair(2, 1))
    assert not alike(pair(2, 0), other)
    assert alike(None, None)


def test_pairs_of_other_specs_are_not_alike() -> None:
    one = pair(2, 0)
    key = replace(one.key, spec=one.key.spec.replace(gain=1.5))
    assert not alike(one, replace(one, key=key))
