"""Budgets and choices of tokens, by hand-made scores and by laws."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from duotone.cache import Importance, Ledger
from duotone.cache.eviction import (
    PYRAMID_DECAY,
    Selection,
    fixed_weights,
    judge_weights,
    judging,
    kept_tokens,
    layer_counts,
    pyramid,
)
from duotone.quant import CacheSpec, Eviction


def mask(*rows: str) -> Tensor:
    return torch.tensor([[mark != "." for mark in row] for row in rows])


def counts(keep: float, weights: list[list[float]], tokens: list[int]) -> list[list[int]]:
    return layer_counts(Eviction(keep), torch.tensor(weights), torch.tensor(tokens)).tolist()


def test_budgets_follow_the_weights() -> None:
    """VL-Cache: beta_l = keep * layers * (1 - gamma_l) / sum (1 - gamma)."""
    assert counts(0.1, [[0.5], [0.3], [0.2]], [100]) == [[15], [9], [6]]


def test_a_clipped_budget_goes_to_the_other_layers() -> None:
    # 2.4 of 1 is what the first layer would get; 0.01 of the prompt is what the last one must.
    assert counts(0.6, [[8.0], [1.0], [1.0], [0.0001]], [100]) == [[100], [70], [69], [1]]


def test_budgets_are_per_sequence() -> None:
    weights = [[0.8, 0.2], [0.2, 0.8]]
    assert counts(0.25, weights, [40, 80]) == [[16, 8], [4, 32]]
    assert counts(0.25, weights, [40, 0]) == [[16, 0], [4, 0]]


def test_rounding_gives_the_largest_remainders_one_more() -> None:
    # 3.27, 3.47 and 3.17 tokens: ten in all.
    assert counts(0.1, [[3.3], [3.5], [3.2]], [33]) == [[3], [4], [3]]


@settings(deadline=None)
@given(data=st.data())
def test_budgets_sum_to_the_memory_asked_for(data: st.DataObject) -> None:
    layers, batch = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    keep = data.draw(st.floats(0.001, 1))
    weight = st.floats(1e-4, 1, allow_nan=False)
    weights = torch.tensor([[data.draw(weight) for _ in range(batch)] for _ in range(layers)])
    tokens = torch.tensor([data.draw(st.integers(1, 300)) for _ in range(batch)])
    got = layer_counts(Eviction(keep), weights, tokens)
    assert (got >= 1).all()
    assert (got <= tokens).all()
    wanted = [round(max(keep * n, 1) * layers) for n in tokens.tolist()]
    assert (got.sum(0) - torch.tensor(wanted)).abs().max() <= 1e-9 * layers
    # A layer with more weight never gets less, but for rounding.
    order = weights.argsort(0)
    assert (got.gather(0, order).diff(dim=0) >= -1).all()


def test_the_pyramid_is_the_released_codes_at_32_layers() -> None:
    """context_length *= schedule_prefill_decay_ratio behind every layer (its cosine schedule)."""
    expected, share = [], 1.0
    for idx in range(32):
        expected.append(share)
        share *= (1.0 - PYRAMID_DECAY) * (math.cos(math.pi * idx / 32) + 1) / 2 + PYRAMID_DECAY
    assert pyramid(32).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("depth", [1, 2, 3, 28, 80])
def test_the_pyramid_never_grows_and_ends_alike_at_every_depth(depth: int) -> None:
    shape = pyramid(depth)
    assert shape[0] == 1
    assert (shape.diff() <= 0).all()
    if depth > 20:
        assert shape[-1] == pytest.approx(pyramid(32)[-1].item(), rel=0.15)


@settings(deadline=None)
@given(keep=st.floats(0.005, 1), depth=st.integers(1, 40), tokens=st.integers(1, 400))
def test_pyramid_counts_never_grow_with_depth(keep: float, depth: int, tokens: int) -> None:
    evict = Eviction(keep, budget="pyramid")
    got = layer_counts(evict, fixed_weights(evict, depth), torch.tensor([tokens]))
    assert (got.diff(dim=0) <= 0).all()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # Judges follow the last picture; padding never judges.
        ({"judges": "post-visual"}, [".......xxx", ".....xxxxx", "........xx", ".........x"]),
        ({"judges": "recent", "window": 0.2}, ["........xx", ".........x"] + ["........xx"] * 2),
        # A window of less than a token is one token.
        ({"judges": "recent", "window": 0.01}, [".........x"] * 4),
    ],
    ids=["post-visual", "recent", "at-least-one"],
)
def test_who_judges(fields: dict[str, object], expected: list[str]) -> None:
    visual = mask("..vv.vv...", "....v.....", "..........", ".vvvvvvvvv")
    real = mask("xxxxxxxxxx", "...xxxxxxx", "xxxxxxxxxx", "xxxxxxxxxx")
    evict = Eviction(**{"window": 0.2, **fields})
    if fields["judges"] == "post-visual":
        # No picture, and nothing behind the picture: the window of a fifth of the tokens.
        expected = [*expected[:2], "........xx", "........xx"]
    assert torch.equal(judging(evict, visual, real), mask(*expected))


def test_the_newest_judge_weighs_most() -> None:
    weights = judge_weights(Eviction(newest_weight=1.2), mask("..xxx", "....x"))
    assert weights.tolist() == [pytest.approx([0, 0, 1, 1.1, 1.2]), pytest.approx([0, 0, 0, 0, 1])]


def chosen(evict: Eviction, scores: list[float], count: int, may_go: str = "") -> str:
    rows = mask(may_go or "x" * len(scores))
    kept = kept_tokens(evict, torch.tensor([scores]), rows, torch.tensor([count]))
    return "".join("x" if flag else "." for flag in kept[0].tolist())


def test_the_best_tokens_stay_behind_sinks_and_recent_ones() -> None:
    scores = [0.1, 0.9, 0.2, 0.8, 0.3, 0.7, 0.4, 0.0]
    assert chosen(Eviction(recent=0), scores, 3) == ".x.x.x.."
    assert chosen(Eviction(recent=0, sink=1), scores, 3) == "xx.x...."
    assert chosen(Eviction(recent=0.34), scores, 3) == ".x.x...x"
    assert chosen(Eviction(recent=1), scores, 3) == ".....xxx"
    # Sinks come first where the budget does not hold both.
    assert chosen(Eviction(recent=1, sink=4), scores, 3) == "xxx....."
    assert chosen(Eviction(recent=0), scores, 8) == "xxxxxxxx"


def test_of_equal_scores_the_earlier_token_stays() -> None:
    assert chosen(Eviction(recent=0), [0.5] * 5, 2) == "xx..."


def test_only_what_may_go_competes() -> None:
    scores = [0.9, 0.1, 0.8, 0.2, 0.7]
    assert chosen(Eviction(recent=0), scores, 2, ".xxx.") == "..xx."
    assert chosen(Eviction(recent=0, sink=1), scores, 1, ".xxx.") == ".x..."
    assert chosen(Eviction(recent=1), scores, 1, ".xxx.") == "...x."


def importance(*rows: list[float], density: float = 0.5) -> Importance:
    return Importance(torch.tensor(rows), torch.full((len(rows),), density))


def test_sparsity_budgets_wait_for_the_last_layer() -> None:
    real, visual = mask("xxxxxxxx"), mask(".vvvv...")
    evict = Eviction(0.5, budget="sparsity", judges="post-visual", recent=0)
    selection = Selection(evict, 2, visual, real)
    scores = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert selection.weights.tolist() == [[0, 0, 0, 0, 0, 1, 1, 1]]
    assert selection.hear(importance(scores, density=0.9)) == []
    first, second = selection.hear(importance(scores[::-1], density=0.3))
    assert torch.equal(first, mask("..xxxxxx"))
    assert torch.equal(second, mask("xx......"))


def test_nested_layers_choose_among_what_the_layer_above_kept() -> None:
    evict = Eviction(0.5, budget="uniform", recent=0, nested=True)
    selection = Selection(evict, 2, mask("......"), mask("xxxxxx"))
    (first,) = selection.hear(importance([0.9, 0.8, 0.7, 0.0, 0.0, 0.0]))
    (second,) = selection.hear(importance([0.0, 0.1, 0.2, 0.9, 0.9, 0.9]))
    assert torch.equal(first, mask("xxx..."))
    assert torch.equal(second, first)


def test_visual_tokens_alone_may_go() -> None:
    evict = Eviction(0.5, which="visual", recent=0)
    selection = Selection(evict, 1, mask(".vvvv.", "......"), mask("xxxxxx", "xxxxxx"))
    (kept,) = selection.hear(importance([0, 0.1, 0.4, 0.3, 0.2, 0], [0.0] * 6))
    assert torch.equal(kept, mask("x.xx.x", "xxxxxx"))


def test_scores_that_are_no_numbers_raise() -> None:
    selection = Selection(Eviction(), 1, mask("..."), mask("xxx"))
    with pytest.raises(ValueError, match="finite"):
        selection.hear(importance([0.0, math.nan, 0.0]))


def test_evicted_tokens_are_counted_and_stored_nowhere() -> None:
    ledger = Ledger(CacheSpec(), 2, torch.device("cpu"))
    visual, real = mask(".vvv..", ".vvv.."), mask("xxxxxx", "..xxxx")
    ledger.plan(visual, real, mask("x.v..x", "...v.x"))
    state = ledger.state
    assert state.visual.positions[:, :1].tolist() == [[2], [3]]
    assert state.dense.lengths.tolist() == [2, 1]
    assert state.evicted.tokens.tolist() == [3, 2]
    assert state.evicted.visual.tolist() == [2, 1]
    ledger.crop(6)
    with pytest.raises(ValueError, match="kept whole"):
        ledger.crop(5)
    ledger.rows(torch.tensor([1, 1]))
    assert ledger.state.evicted.tokens.tolist() == [2, 2]


def test_a_picture_with_holes_is_still_one_range() -> None:
    ledger = Ledger(CacheSpec(ranges="run"), 1, torch.device("cpu"))
    plan = ledger.plan(mask("vvvv.vvvv"), mask("xxxxxxxxx"), mask("x.x..x.xx"))
    assert plan.visual.spans.sizes.tolist() == [[2, 3]]


def test_a_ledger_that_evicts_nothing_can_be_cropped() -> None:
    ledger = Ledger(CacheSpec(), 1, torch.device("cpu"))
    ledger.plan(mask("...."), mask("xxxx"), mask("xxxx"))
    ledger.crop(2)
    assert ledger.state.dense.lengths.tolist() == [2]
