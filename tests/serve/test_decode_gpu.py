"""Decode steps by kernels against plain torch, on a real GPU."""

import pytest
import torch
from cuda_device import NEEDS_KERNELS
from steps import StepCase, by_torch

from duotone.attention.cuda.groups.step_numbers import StepNumbers, numbers_by_torch
from duotone.serve.pages import PageLayout

pytestmark = NEEDS_KERNELS
FP16, BF16, CUDA = torch.float16, torch.bfloat16, torch.device("cuda")


def lengths_of(layout: PageLayout, requests: int) -> list[int]:
    """Lengths about the edges of pages, and others."""
    page = layout.tokens
    edges = [1, page - 1, page, page + 1, 2 * page, 2 * page + page // 2 + 1]
    return [edges[n] if n < len(edges) else 1 + n * 7 % (3 * page) for n in range(requests)]


@pytest.mark.parametrize(
    ("requests", "gqa"), [(6, 1), (6, 4), (6, 6), (6, 7), (6, 8), (150, 4)], ids=str
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("bits", [2, 4])
def test_steps_are_those_of_plain_torch(
    bits: int, head_dim: int, requests: int, gqa: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = PageLayout(bits, head_dim, FP16 if gqa == 6 else BF16)
    case = StepCase(layout, lengths_of(layout, requests), gqa, CUDA)
    by_torch(monkeypatch)
    ours, theirs = case.appended()
    assert torch.equal(ours, theirs)
    out, wanted = case.attended(ours, case.states[0])
    torch.testing.assert_close(out, wanted, rtol=2e-2, atol=1e-2)


def test_tokens_in_strides_and_replayed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """K and V are slices of a product; a graph of a step follows the numbers of the next one."""
    layout = PageLayout(2, 128, BF16)
    case = StepCase(layout, lengths_of(layout, 8), 4, CUDA)
    q, k, v = case.states
    case.states = torch.cat([q, k, v], 1).split([x.shape[1] for x in (q, k, v)], 1)
    q = case.states[0]
    by_torch(monkeypatch)
    warm, theirs = case.appended()
    assert torch.equal(warm, theirs)
    pool, out = case.pool.clone(), torch.empty(q.shape, dtype=q.dtype, device=CUDA)
    call = (pool, case.pages, q, 0.1, out)
    case.step.attend(*call)
    graph = torch.cuda.CUDAGraph()
    pool.copy_(case.pool)
    with torch.cuda.graph(graph):
        case.step.store(pool, *case.states[1:])
        case.step.attend(*call)
    pool.copy_(case.pool)
    graph.replay()
    assert torch.equal(pool, theirs)
    first = out.clone()
    case.step.numbers.position.fill_(-1), case.step.numbers.full.fill_(0)
    graph.replay()  # nothing is kept, and the tokens are there
    assert torch.equal(pool, theirs)
    torch.testing.assert_close(out, first, rtol=2e-2, atol=1e-2, equal_nan=True)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_numbers_of_a_step_are_those_of_torch(head_dim: int) -> None:
    layout = PageLayout(2, head_dim, BF16)
    case = StepCase(layout, lengths_of(layout, 200), 4, CUDA)
    wanted = StepNumbers.zeros(203, layout.rings, CUDA)
    slots = torch.tensor([0] * 200 + [-1, -1], device=CUDA)
    lengths = torch.tensor([*case.lengths, layout.tokens, 0], device=CUDA)
    numbers_by_torch(lengths, case.pages, [case.blocks], slots, layout.tokens, wanted)
    assert all(
        torch.equal(x, y) for x, y in zip(*map(_all, (case.step.numbers, wanted)), strict=True)
    )
    assert wanted.full.any()


def _all(numbers: StepNumbers) -> list[torch.Tensor]:
    return [*vars(numbers).values()]
