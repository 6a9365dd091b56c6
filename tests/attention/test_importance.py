"""Scores and density against loops over single queries and heads."""

import pytest
import torch
from torch import Tensor

from duotone.attention import measure_importance

BATCH, Q_HEADS, KV_HEADS, TOKENS, DIM = 2, 6, 2, 23, 8


def case() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    query = 3 * torch.randn(BATCH, Q_HEADS, TOKENS, DIM)
    key = torch.randn(BATCH, KV_HEADS, TOKENS, DIM)
    weights = torch.zeros(BATCH, TOKENS)
    weights[0, 17:] = torch.linspace(1, 1.2, TOKENS - 17)
    weights[1, 21:] = 1.0
    place = torch.arange(TOKENS)
    visible = (place <= place[:, None]).repeat(BATCH, 1, 1)
    visible[1, :, :5] = False  # padding
    return query, key, weights, visible


def by_loops(
    query: Tensor, key: Tensor, weights: Tensor, visible: Tensor, scale: float
) -> tuple[Tensor, list[float]]:
    scores, density = torch.zeros(BATCH, TOKENS), []
    for b in range(BATCH):
        shares = []
        for h in range(Q_HEADS):
            reached = pairs = 0
            for i in weights[b].nonzero().flatten().tolist():
                seen = visible[b, i].nonzero().flatten()
                logits = key[b, h // (Q_HEADS // KV_HEADS), seen] @ query[b, h, i] * scale
                attention = logits.softmax(0)
                scores[b, seen] += weights[b, i] * attention / Q_HEADS
                reached += int((attention >= 0.01 * attention.max()).sum())
                pairs += len(seen)
            shares.append(reached / pairs)
        density.append(sum(shares) / Q_HEADS)
    return scores, density


@pytest.mark.parametrize("tile", [2**24, 1, BATCH * Q_HEADS * TOKENS * 4])
def test_scores_and_density_equal_loops(tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duotone.attention.importance.LARGEST_TILE", tile)
    query, key, weights, visible = case()
    found = measure_importance(query, key, weights, lambda rows: visible[:, rows], 0.35)
    scores, density = by_loops(query, key, weights, visible, 0.35)
    torch.testing.assert_close(found.scores, scores)
    assert found.density.tolist() == pytest.approx(density)
    assert 0 < found.density.min() < found.density.max() < 1
    assert not found.scores[1, :5].any()
    # Every judge hands out its weight.
    torch.testing.assert_close(found.scores.sum(1), weights.sum(1))


def test_queries_before_the_first_judge_are_not_computed() -> None:
    query, key, weights, visible = case()
    asked: list[slice] = []

    def watched(rows: slice) -> Tensor:
        asked.append(rows)
        return visible[:, rows]

    measure_importance(query, key, weights, watched, 1.0)
    assert asked[0].start == 17


def test_a_sequence_without_tokens_is_all_dense() -> None:
    query, key, weights, visible = case()
    weights[1], visible[1] = 0, False
    found = measure_importance(query, key, weights, lambda rows: visible[:, rows], 1.0)
    assert found.density[1] == 1
    assert not found.scores[1].any()
