"""Tokens of a span by how far they stand out, against a loop."""

import math
import re
from itertools import pairwise

import pytest
import torch
from no_questions import NoQuestions

from duotone.cache import AppendPlan, Ledger
from duotone.cache.blocks import BlockTable, single_block
from duotone.cache.ragged import valid_mask
from duotone.cache.saliency import foreground_first, saliency_order
from duotone.quant import CacheSpec, KVSpec, TensorSpec

TABLES = {
    "one-span": [[0, 11], [0, 11]],
    "two-spans": [[0, 4, 11], [0, 10, 11]],
    "ragged": [[0, 4, 11], [0, 3, 3]],
    "one-token": [[0, 1], [0, 1]],
    "empty-row": [[0, 6], [0, 0]],
}


def by_loop(x: torch.Tensor, offsets: list[list[int]]) -> torch.Tensor:
    order = torch.arange(x.shape[2]).expand(x.shape[:3]).clone()
    for b, edges in enumerate(offsets):
        for head in range(x.shape[1]):
            for start, stop in pairwise(edges):
                span = x[b, head, start:stop]
                far = (span - span.mean(0)).square().sum(-1)
                order[b, head, start:stop] = start + far.argsort(descending=True, stable=True)
    return order


@pytest.mark.parametrize("name", TABLES)
def test_falls_within_every_span(name: str) -> None:
    torch.manual_seed(0)
    table = BlockTable(torch.tensor(TABLES[name]))
    x = torch.randn(2, 3, 13, 8, dtype=torch.float64)
    assert torch.equal(saliency_order(x, table), by_loop(x, TABLES[name]))


def test_padding_may_hold_anything() -> None:
    table = BlockTable(torch.tensor(TABLES["ragged"]))
    x = torch.randn(2, 3, 13, 8)
    poisoned = x.clone()
    poisoned[1, :, 3:] = float("nan")
    assert torch.equal(saliency_order(poisoned, table)[1], saliency_order(x, table)[1])


def test_equal_tokens_keep_their_order() -> None:
    order = saliency_order(torch.ones(1, 1, 6, 4), single_block(torch.tensor([6])))
    assert order.tolist() == [[list(range(6))]]


SPEC = CacheSpec(
    visual=KVSpec(TensorSpec(4), TensorSpec(4)),
    background=KVSpec(TensorSpec(1), TensorSpec(1)),
    foreground=0.4,
    ranges="run",
)
# A letter per token, v of a picture; padding is a dot. Two tokens are as far from their mean.
PROMPTS = {
    "one span": ["tvvvvvvvt"] * 2,
    "spans alike": ["vvvvtvvvv"] * 2,
    "ragged": ["vvvvvtvvv", "..vttvvvt"],
    "without a picture": ["vvvvvvvvv", "....ttttt"],
    "tokens alone": ["vtvtvtvtv", ".vtvtvtvt"],
}


def planned(prompt: list[str], spec: CacheSpec = SPEC) -> AppendPlan:
    visual, real = (torch.tensor([[c in of for c in row] for row in prompt]) for of in ("v", "tv"))
    return Ledger(spec, len(prompt), visual.device).plan(visual, real)


def parts_by_loop(key: torch.Tensor, row: str, share: float) -> list[list[int]]:
    """Tokens of foreground and background of the spans of one sequence's head."""
    front, back = [], []
    for run in re.finditer("v+", row):
        span = key[run.start() : run.end()]
        far = (span - span.mean(0)).square().sum(-1)
        order = (run.start() + far.argsort(descending=True, stable=True)).tolist()
        first = math.ceil(share * len(span))
        front, back = front + order[:first], back + order[first:]
    return [front, back]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", PROMPTS)
def test_each_part_has_its_tokens_span_by_span_k_and_v_alike(name: str, ties: bool) -> None:
    torch.manual_seed(0)
    prompt, plan = PROMPTS[name], planned(PROMPTS[name])
    key, value = torch.randn(2, 2, 9, 3, 4, dtype=torch.float64).transpose(2, 3)
    if ties:
        key = key[:, :, torch.arange(9) % 3]
    shown = foreground_first(key, value, plan.spans, None)
    for at, piece in enumerate((plan.visual, plan.background)):
        for b, row in enumerate(prompt):
            for head in range(3):
                tokens = parts_by_loop(key[b, head], row, SPEC.foreground)[at]
                assert piece is not None or not tokens
                if piece is not None:
                    for x, taken in zip((key, value), shown, strict=True):
                        ours = piece.take.apply(taken)[b, head, : piece.take.lengths[b]]
                        assert torch.equal(ours, x[b, head, tokens])


def test_parts_lie_side_by_side() -> None:
    """Kernels read them without a copy, whatever the spans."""
    plan = planned(PROMPTS["ragged"])
    key = torch.randn(2, 3, 9, 4)
    shown, _ = foreground_first(key, key, plan.spans, None)
    front, back = plan.visual.take, plan.background.take
    assert shown.shape[2] == front.tokens + back.tokens
    assert front.pick(shown).data_ptr() == shown.data_ptr()
    assert back.pick(shown).data_ptr() == shown[:, :, front.tokens :].data_ptr()


@pytest.mark.parametrize(("name", "most"), [("one span", 10), ("spans alike", 12), ("ragged", 15)])
def test_a_layer_takes_few_operations_after_the_first(name: str, most: int) -> None:
    """Later layers find what all share, and ask the host nothing."""
    plan, key = planned(PROMPTS[name]), torch.randn(2, 3, 9, 4, dtype=torch.bfloat16)
    foreground_first(key, key, plan.spans, None)
    with NoQuestions() as layer:
        foreground_first(key, key, plan.spans, None)
    assert layer.computed <= most


def test_a_basis_decides_what_stands_out() -> None:
    key = torch.tensor([[3.0, 0], [-1, 0], [-1, 0], [-1, 2], [0, -2]])[None, None]
    plan = planned(["vvvvv"])
    plain, _ = foreground_first(key, key, plan.spans, None)
    turned, _ = foreground_first(key, key, plan.spans, "hadamard")
    assert plain[0, 0, 0].tolist() == [3, 0]
    torch.testing.assert_close(turned, plain)  # An orthogonal basis keeps distances.


@pytest.mark.parametrize("name", PROMPTS)
def test_a_basis_finds_spans_wherever_they_are(name: str) -> None:
    torch.manual_seed(0)
    plan, key = planned(PROMPTS[name]), torch.randn(2, 3, 9, 4, dtype=torch.float64)
    turned, _ = foreground_first(key, key, plan.spans, "hadamard")
    plain, _ = foreground_first(key, key, plan.spans, None)
    for piece in (plan.visual, plan.background):
        if piece is not None:
            mask = valid_mask(piece.take.lengths, piece.take.tokens)[:, None, :, None]
            ours, theirs = (piece.take.apply(x) * mask for x in (turned, plain))
            torch.testing.assert_close(ours, theirs)
