"""Records of a later turn join those of earlier ones: what stands where afterwards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from same_tokens import assert_same_tokens

from duotone.attention.cuda.classes.layout import class_layout
from duotone.attention.cuda.shared.slots import record_slots
from duotone.attention.cuda.spans.layout import span_layout
from duotone.cache import BlockTable, pack_tensor
from duotone.cache.pair import PackedPair
from duotone.cache.ragged import concatenate
from duotone.quant import TensorSpec

from cases import CALIBRATED, SMALL, SMALL_TILES, UNITS

# {name: (layout, quantizers of K and V)}; those of TILES have a table of K's groups.
KINDS = {
    **{f"{bits} bits": (span_layout, (TensorSpec(bits),) * 2) for bits in (1, 2, 3)},
    "calibrated": (class_layout, CALIBRATED),
    "units": (class_layout, UNITS),
    "small": (class_layout, SMALL),
    "plain K": (class_layout, (TensorSpec(1), UNITS[1])),
}
TILES = (class_layout, SMALL_TILES)
# Offsets of pictures of two turns, of which some sequences have none.
TURNS = [
    ([[0, 512, 1024], [0, 512, 512]], [[0, 512], [0, 0]]),
    ([[0, 512]], [[0, 512, 1024]]),
    ([[0, 0], [0, 512]], [[0, 512, 1024], [0, 512, 512]]),
]


def pair_of(specs: tuple[TensorSpec, TensorSpec], offsets: list[list[int]]) -> PackedPair:
    blocks = BlockTable(torch.tensor(offsets))
    states = torch.randn(2, len(offsets), 2, blocks.tokens, 64)
    return PackedPair(*(pack_tensor(x, s, blocks) for x, s in zip(states, specs, strict=True)))


def appended(old: PackedPair, new: PackedPair) -> PackedPair:
    lengths = (pair.value.blocks.lengths for pair in (old, new))
    return old.append(new, concatenate(*lengths, old.key.tokens))


def assert_joins_by_copying(layout, old: PackedPair, new: PackedPair, rows=None) -> None:
    """rows: sequences that are picked before the second turn."""
    ours, theirs = old.laid_out(layout), new.laid_out(layout)
    assert ours.records.format == theirs.records.format
    if rows is not None:
        old, ours = old.rows(rows), ours.rows(rows)
    plain, both = appended(old, new), appended(ours, theirs)
    assert both.records is not None
    assert both.records.data.is_contiguous()
    token, first = record_slots(plain.value.blocks, both.records.format.tokens)
    assert torch.equal(both.records.first, first)
    assert both.records.data.shape[2] * both.records.format.tokens == token.shape[1]
    one = both.canonical()
    assert_same_tokens(one.key, plain.key)
    assert_same_tokens(one.value, plain.value)


@pytest.mark.parametrize("turns", TURNS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_records_of_two_turns_join_by_copying(kind: str, turns) -> None:
    torch.manual_seed(0)
    layout, specs = KINDS[kind]
    assert_joins_by_copying(layout, *(pair_of(specs, offsets) for offsets in turns))


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_that_were_picked_have_room_after_their_records(kind: str) -> None:
    """Rows stay as wide as those of the sequence with most pictures, which is gone."""
    torch.manual_seed(0)
    layout, specs = KINDS[kind]
    old = pair_of(specs, [[0, 512, 1024, 1536], [0, 512, 512, 512]])
    for rows, offsets in (([1], [[0, 512]]), ([1, 1], [[0, 512], [0, 0]])):
        new = pair_of(specs, offsets)
        assert_joins_by_copying(layout, old, new, torch.tensor(rows))


COUNTS = st.lists(st.integers(0, 3), min_size=2, max_size=3).filter(any)


@given(COUNTS, COUNTS, st.randoms(use_true_random=False))
def test_any_pictures_of_any_sequences_join(first: list[int], second: list[int], draw) -> None:
    torch.manual_seed(0)
    layout, specs = KINDS["small"]
    old = pair_of(specs, [[256 * min(i, n) for i in range(max(first) + 1)] for n in first])
    rows = [draw.randrange(len(first)) for _ in second]
    if not any(first[row] for row in rows):
        return
    new = pair_of(specs, [[256 * min(i, n) for i in range(max(second) + 1)] for n in second])
    assert_joins_by_copying(layout, old, new, torch.tensor(rows))


def test_records_of_another_size_or_with_groups_of_k_do_not_join() -> None:
    torch.manual_seed(0)
    for (layout, specs), second in ((KINDS["small"], [[0, 110]]), (TILES, [[0, 300, 400]])):
        old, new = pair_of(specs, [[0, 300, 400]]), pair_of(specs, second)
        both = appended(old.laid_out(layout), new.laid_out(layout))
        assert both.records is None
        plain = appended(old, new)
        assert_same_tokens(both.key, plain.key)
        assert_same_tokens(both.value, plain.value)
