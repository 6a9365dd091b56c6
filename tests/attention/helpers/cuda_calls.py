"""Calls of the CUDA kernels over segments that `laid_out` puts in records, and their reference."""

from collections.abc import Callable

import torch
from torch import Tensor

from duotone.attention import decode_attention

from cases import Case, assert_near_half, build, poisoned, reference


def assert_near_the_reference(case: Case, laid_out: Callable, query_scale: float = 1) -> None:
    """Where no token is, segments are poisoned."""
    query, kv = build(case)
    query, call = query * query_scale, {"sm_scale": case.sm_scale, "tau": case.tau}
    out = decode_attention(query, laid_out(poisoned(kv)), **call, impl="cuda")
    assert_near_half(out, reference(case, query, kv))


def assert_replays_take_new_queries(
    case: Case, laid_out: Callable, near: Callable = assert_near_half, calls: int = 1
) -> None:
    """Launches of one call begin while those of the call before it end."""
    query, kv = build(case)
    segments, call = laid_out(kv), {"sm_scale": case.sm_scale, "tau": case.tau, "impl": "cuda"}
    decode_attention(query, segments, **call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [decode_attention(query, segments, **call) for _ in range(calls)]
    for seed in (1, 2, 3):
        query.copy_(build(case, seed)[0])
        graph.replay()
        for out in outs:
            near(out, reference(case, query, kv))


def assert_every_impl_is_near(case: Case, laid_out: Callable) -> None:
    """Check every implementation, `auto` included, on segments in records."""
    query, kv = build(case)
    segments, expected = laid_out(kv), reference(case, query, kv)
    for impl in ("auto", "cuda", "triton", "reference"):
        out = decode_attention(query, segments, sm_scale=case.sm_scale, impl=impl)
        assert_near_half(out, expected)


def assert_sums_are_right(case: Case, lse: Tensor, query: Tensor, key: Tensor) -> None:
    """`lse`: logarithms to base 2 of the sums of exponentials, for one kv head."""
    for b, length in enumerate(case.lengths):
        scores = query[b, :, 0].double() @ key[b, 0, :length].T.double() * case.sm_scale
        expected = scores.logsumexp(-1) / torch.log(torch.tensor(2.0, dtype=torch.float64))
        torch.testing.assert_close(lse[b].double(), expected, rtol=1e-3, atol=2e-3)
