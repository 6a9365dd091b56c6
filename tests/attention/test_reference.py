"""Post-scaling from codes against dequantize-then-attend in fp64, query by query."""

import math

import pytest
import torch
from torch import Tensor

from duotone.attention import attend, decode_attention, merge_partials
from duotone.cache import BlockTable, DenseSegment, PackedSegment, Segment, pack_tensor
from duotone.quant import TensorSpec, calibration_affine

from cases import TOLERANCES, assert_near

B, H, D = 3, 2, 48


def naive(
    query: Tensor,
    kv: list[Segment],
    sm_scale: float,
    tau: tuple[float, float] | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Plain loops, dequantized, fp64."""
    group = query.shape[1] // H
    out = torch.zeros(*query.shape[:3], D, dtype=torch.float64)
    for b in range(query.shape[0]):
        for h in range(query.shape[1]):
            for i in range(query.shape[2]):
                keys, values, visual = gather(kv, b, h // group, i)
                scores = keys @ query[b, h, i].double() * sm_scale
                if softcap is not None:
                    scores = softcap * (scores / softcap).tanh()
                if tau is not None and visual.any():
                    ends = scores[visual].min(), scores[visual].max()
                    slope, offset = calibration_affine(*ends, tau)
                    scores[visual] = slope * scores[visual] + offset
                if len(scores):
                    out[b, h, i] = scores.softmax(0) @ values
    return out


def gather(kv: list[Segment], b: int, h: int, i: int) -> tuple[Tensor, Tensor, Tensor]:
    keys, values, visual = [], [], []
    for segment in kv:
        n = int(segment.lengths[b])
        keep = torch.ones(n, dtype=torch.bool)
        if segment.mask is not None:
            keep = segment.mask[b, i, :n]
        k, v = segment.key, segment.value
        k, v = (x if isinstance(x, Tensor) else x.dequantize() for x in (k, v))
        keys.append(k[b, h, :n][keep].double())
        values.append(v[b, h, :n][keep].double())
        visual += [segment.visual] * int(keep.sum())
    return torch.cat(keys), torch.cat(values), torch.tensor(visual, dtype=torch.bool)


def packed(
    key: TensorSpec, value: TensorSpec, table: BlockTable, visual: bool = True, seed: int = 0
) -> PackedSegment:
    torch.manual_seed(seed)
    n = int(table.lengths.max())
    k, v = torch.randn(B, H, n, D) + torch.randn(D), torch.randn(B, H, n, D)
    past_end = torch.arange(n) >= table.lengths[:, None]
    k[past_end[:, None].expand(-1, H, -1)] = float("nan")
    v[past_end[:, None].expand(-1, H, -1)] = float("nan")
    return PackedSegment(
        pack_tensor(k, key, table), pack_tensor(v, value, table), table.lengths, visual
    )


def dense(lengths: list[int], seed: int = 1) -> DenseSegment:
    torch.manual_seed(seed)
    n = max(lengths) + 2
    k, v = torch.randn(B, H, n, D), torch.randn(B, H, n, D)
    for b, m in enumerate(lengths):
        k[b, :, m:] = v[b, :, m:] = float("nan")
    return DenseSegment(k, v, torch.tensor(lengths))


@pytest.mark.parametrize("dtype", sorted(TOLERANCES, key=str), ids=str)
def test_the_comparison_notices_errors(dtype: torch.dtype) -> None:
    x = torch.randn(4, 64, dtype=torch.float64).to(dtype)
    assert_near(x, x)
    wrong = x.clone()
    wrong[0, 0] += 0.1 * x.abs().max()
    for other in (x * 1.02, torch.zeros_like(x), x * float("nan"), wrong, x[:2]):
        with pytest.raises((AssertionError, RuntimeError)):
            assert_near(other, x)


TABLES = {
    "one-span": [[0, 63], [0, 1], [0, 40]],
    "two-spans": [[0, 20, 63], [0, 10, 10], [0, 1, 2]],
    "some-empty": [[0, 100, 111], [0, 0, 0], [0, 7, 7]],
}
TENSORS = {
    "1b-tokens": TensorSpec(1),
    "2b-tokens-g32": TensorSpec(2, group=32),
    "4b-channels-g32": TensorSpec(4, "channels", 32),
    "8b-channels": TensorSpec(8, "channels"),
    "3b-tokens-g24": TensorSpec(3, group=24),
    "1b-span": TensorSpec(1, "span", levels="lloyd"),
    "2b-symmetric": TensorSpec(2, group=7, mapping="symmetric"),
    "rotated-g32": TensorSpec(2, group=32, transform="hadamard"),
    "rotated-channels": TensorSpec(2, "channels", 8, transform="hadamard"),
    "rotated-classes": TensorSpec(1, classes=((4, 1 / 4),), transform="hadamard"),
    "classes-g32": TensorSpec(1, group=32, classes=((4, 1 / 16), (2, 1 / 4), (1, 1 / 4))),
    "8-bit-params": TensorSpec(2, group=32, classes=((4, 1 / 4),), param_dtype="float8"),
    "1b-hybrid": TensorSpec(1, "channels", 16, mapping="hybrid"),
    "2b-hybrid-g32": TensorSpec(2, group=32, mapping="hybrid"),
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("value", TENSORS)
@pytest.mark.parametrize("key", TENSORS)
def test_packed_segment(key: str, value: str, table: str) -> None:
    segment = packed(TENSORS[key], TENSORS[value], BlockTable(torch.tensor(TABLES[table])))
    query = torch.randn(B, 4, 1, D)
    ours = decode_attention(query, [segment], sm_scale=0.3, impl="reference")
    assert_near(ours, naive(query, [segment], 0.3).float())


@pytest.mark.parametrize("tau", [None, (0.0, 3.0), (1.0, 0.0)], ids=["plain", "tau03", "tau10"])
@pytest.mark.parametrize("group", [1, 4, 6, 7])
def test_mixed_segments_and_calibration(group: int, tau: tuple[float, float] | None) -> None:
    table = BlockTable(torch.tensor(TABLES["some-empty"]))
    kv: list[Segment] = [
        packed(TENSORS["1b-tokens"], TENSORS["1b-tokens"], table),
        packed(TENSORS["2b-tokens-g32"], TENSORS["4b-channels-g32"], table, False, seed=3),
        dense([5, 1, 9]),
    ]
    query = torch.randn(B, H * group, 1, D)
    ours = decode_attention(query, kv, sm_scale=D**-0.5, tau=tau)
    assert_near(ours, naive(query, kv, D**-0.5, tau).float())


@pytest.mark.parametrize("tau", [None, (0.0, 2.0)], ids=["plain", "calibrated"])
@pytest.mark.parametrize("limit", [1 << 24, 600])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_chunks_of_queries_with_masks(
    limit: int,
    tau: tuple[float, float] | None,
    softcap: float | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("duotone.attention.reference.MAX_SCORES", limit)
    table = BlockTable(torch.tensor(TABLES["two-spans"]))
    past = packed(TENSORS["2b-tokens-g32"], TENSORS["1b-tokens"], table)
    own = dense([7, 7, 7])
    masks = [torch.rand(B, 7, s.tokens) < 0.6 for s in (past, own)]
    kv: list[Segment] = [
        PackedSegment(past.key, past.value, past.lengths, True, masks[0]),
        DenseSegment(own.key, own.value, own.lengths, mask=masks[1]),
    ]
    query = torch.randn(B, 4, 7, D)
    ours = attend(query, kv, sm_scale=0.2, tau=tau, softcap=softcap)
    assert_near(ours, naive(query, kv, 0.2, tau, softcap).float())


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    own = dense([4, 4, 4])
    mask = torch.zeros(B, 1, own.tokens, dtype=torch.bool)
    blind = DenseSegment(own.key, own.value, own.lengths, mask=mask)
    out = attend(torch.randn(B, 4, 1, D), [blind], sm_scale=1.0)
    assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_queries_keep_their_dtype(dtype: torch.dtype) -> None:
    segment = packed(
        TENSORS["1b-tokens"], TENSORS["1b-tokens"], BlockTable(torch.tensor([[0, 9]] * 3))
    )
    query = torch.randn(B, 4, 1, D).to(dtype)
    out = decode_attention(query, [segment], sm_scale=0.3)
    assert out.dtype == dtype
    assert_near(out, naive(query, [segment], 0.3).to(dtype))


def test_fp64_queries_are_exact_to_fp64() -> None:
    own = dense([4, 3, 2])
    query = torch.randn(B, 4, 1, D, dtype=torch.float64)
    truth = naive(query, [own], 0.3)
    assert (attend(query, [own], sm_scale=0.3) - truth).norm() < 1e-13 * truth.norm()


def test_merging_parts_equals_attending_to_all() -> None:
    scores, values = torch.randn(5, 2, 30, dtype=torch.float64), torch.randn(30, 8).double()
    whole = scores.softmax(-1) @ values
    parts = []
    for piece in (slice(0, 1), slice(1, 20), slice(20, 30)):
        s = scores[..., piece]
        parts.append((s.softmax(-1) @ values[piece], s.logsumexp(-1)))
    hidden = torch.full((5, 2), -math.inf, dtype=torch.float64)
    parts.append((torch.zeros(5, 2, 8, dtype=torch.float64), hidden))
    out, lse = merge_partials(parts)
    assert torch.allclose(out, whole)
    assert torch.allclose(lse, scores.logsumexp(-1))


@pytest.mark.parametrize(
    ("query", "impl", "rule"),
    [
        (torch.zeros(B, 4, 2, D), "auto", "query must be"),
        (torch.zeros(B, 3, 1, D), "auto", "multiple of"),
        (torch.zeros(B, 4, 1, D + 1), "auto", "head_dim"),
        (torch.zeros(B + 1, 4, 1, D), "auto", "batch"),
        (torch.zeros(B, 4, 1, D), "flash", "impl must be one of"),
        (torch.zeros(B, 4, 1, D), "cuda", "need a CUDA device"),
    ],
)
def test_bad_arguments_raise(query: Tensor, impl: str, rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        decode_attention(query, [dense([4, 4, 4])], sm_scale=1.0, impl=impl)


def test_an_empty_cache_raises() -> None:
    with pytest.raises(ValueError, match="at least one segment"):
        decode_attention(torch.zeros(1, 1, 1, D), [], sm_scale=1.0)
