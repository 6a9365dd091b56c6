"""Attention of one sequence, against loops over heads, queries and tokens."""

import math

import pytest
import torch

from duotone.attention import attend
from duotone.cache import DenseSegment
from duotone.inspection.scores import Attention, compare


def attention(group=2, queries=3, tokens=7, visual=4):
    torch.manual_seed(0)
    key, value = torch.randn(2, 2, tokens, 8)
    query = torch.randn(2 * group, queries, 8)
    places = torch.arange(tokens - queries, tokens)
    visible = torch.arange(tokens) <= places[:, None]
    return Attention(query, key, value, visible, torch.arange(tokens) < visual, 0.3)


def loop(given, head, query, group):
    """(scores of visible tokens, weights, output) of one head and query, as lists."""
    tokens = [t for t in range(given.key.shape[1]) if given.visible[query, t]]
    q, k = given.query[head, query], given.key[head // group]
    scores = [given.sm_scale * float(q @ k[t]) for t in tokens]
    if given.tau is not None:
        seen = [s for t, s in zip(tokens, scores, strict=True) if given.visual[t]]
        low, high = min(seen), max(seen)
        slope = (high - given.tau[1] - low + given.tau[0]) / (high - low)
        scores = [
            (s - low) * slope + low - given.tau[0] if given.visual[t] else s
            for t, s in zip(tokens, scores, strict=True)
        ]
    total = sum(math.exp(s) for s in scores)
    weights = [math.exp(s) / total for s in scores]
    output = sum(w * given.value[head // group][t] for t, w in zip(tokens, weights, strict=True))
    return scores, weights, output


@pytest.mark.parametrize("group", [1, 2, 3])
@pytest.mark.parametrize("tau", [None, (0.1, 0.2)])
def test_errors_are_those_of_a_loop(group, tau):
    exact = attention(group)
    coded = exact.coded(exact.key + 0.1, exact.value * 1.1, tau)
    found = compare(exact, coded, exact.visual)
    squares, pairs, difference, norm = 0.0, 0, 0.0, 0.0
    for head in range(2 * group):
        for query in range(3):
            (_, a, x), (_, b, y) = (loop(given, head, query, group) for given in (exact, coded))
            squares += sum((p - q) ** 2 for p, q in zip(a, b, strict=True))
            pairs += len(a)
            difference += float((x - y).square().sum())
            norm += float(x.square().sum())
    assert found.weights_mse == pytest.approx(squares / pairs, rel=1e-4)
    assert found.output_error == pytest.approx((difference / norm) ** 0.5, rel=1e-4)
    assert len(found.exact) == len(found.scores) == 2 * group * 3 * 4
    scores, _, _ = loop(coded, 0, 0, group)
    assert found.scores[:4].tolist() == pytest.approx(scores[:4], rel=1e-4)


def test_outputs_are_those_of_the_reference():
    exact = attention()
    segment = DenseSegment(
        exact.key[None], exact.value[None], torch.tensor([7]), mask=exact.visible[None]
    )
    expected = attend(exact.query[None], [segment], sm_scale=exact.sm_scale)[0]
    torch.testing.assert_close(exact.output(exact.weights(exact.scores())), expected)


def test_the_same_states_have_no_error_and_tau_needs_visual_tokens():
    exact = attention(visual=0)
    found = compare(exact, exact.coded(exact.key, exact.value, (0.0, 2.0)), exact.visual)
    assert (found.weights_mse, found.output_error, len(found.scores)) == (0.0, 0.0, 0)


def test_heads_that_do_not_fit_are_refused():
    given = attention()
    with pytest.raises(RuntimeError, match="unflatten"):
        given.coded(given.key[:1].repeat(3, 1, 1), given.value, None).scores()
