"""A step's mask in the order of stores: as rolls have it, and found once."""

import pytest
import torch

from duotone.cache import Visibility
from duotone.cache.index import Roll
from duotone.cache.visibility import MOST


def roll(*positions: int) -> Roll:
    return Roll(torch.tensor([positions]), torch.tensor([len(positions)]))


def visibility() -> Visibility:
    """Two queries of six tokens; the second sees the last three, too."""
    return Visibility(torch.tensor([[[True, True, True, False, False, False], [True] * 6]]))


def test_a_store_sees_the_mask_in_its_order() -> None:
    seen, store = visibility(), roll(4, 0)
    assert seen.of(store).tolist() == [[[False, True], [True, True]]]
    assert seen.of(store) is seen.of(store)
    assert seen.of(roll(4, 0)) is not seen.of(store)


def test_the_last_results_are_kept() -> None:
    seen, calls, first = visibility(), [], object()
    for thing in (first, *(object() for _ in range(MOST - 1)), first, object(), first):
        seen.once(lambda: calls.append(thing), thing)  # noqa: B023
    assert calls.count(first) == 2
    assert len(seen._known) == MOST


def test_results_are_of_all_objects_given() -> None:
    seen, one, other = visibility(), object(), object()
    found = [seen.once(object, *of) for of in ((one,), (other,), (one, other), (other, one))]
    assert len({id(x) for x in found}) == 4
    assert seen.once(object, one, other) is found[2]


def test_numbers_are_compared_by_what_they_are() -> None:
    seen, thing = visibility(), object()
    large = seen.once(object, thing, int("1000"))
    assert seen.once(object, thing, int("1000")) is large
    assert seen.once(object, thing, 1001) is not large


def test_large_masks_are_not_kept(monkeypatch) -> None:
    monkeypatch.setattr("duotone.cache.visibility.MOST_ELEMENTS", 11)
    seen, store = visibility(), roll(4, 0)
    assert torch.equal(seen.of(store), visibility().of(store))
    assert not seen._known


def test_visual_tokens_are_seen_as_a_whole() -> None:
    seen = visibility()
    seen.check_whole(roll(0, 1), roll(2))
    seen.check_whole(roll(3, 5), roll(4))
    for _ in range(2):  # a refusal is not taken for a result
        with pytest.raises(ValueError, match="hides a part of them"):
            seen.check_whole(roll(1, 2), roll(3))
