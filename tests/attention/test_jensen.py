"""Reads of factors and codebooks from codes, and Jensen's correction of scores."""

import math

import pytest
import torch
from torch import Tensor

from duotone.attention import attend
from duotone.attention.chunk import attend_chunk
from duotone.cache import BlockTable, DenseSegment, PackedSegment, pack_tensor
from duotone.quant import TensorSpec
from duotone.quant.rotation import hadamard
from duotone.tools.slow_paths import SlowPaths, SlowPathWarning

BATCH, HEADS, D, GROUP = 2, 2, 32, 3
BALANCED = {"factors": "balanced", "transform": "hadamard"}
TENSORS = {
    "plain": TensorSpec(2, group=8),
    "per token": TensorSpec(2, "channels", 16, transform="hadamard"),
    "norms": TensorSpec(2, group=8, factors="norm", grid="zero"),
    "token factors": TensorSpec(3, group=16, **BALANCED),
    "channel factors": TensorSpec(2, "channels", 16, tile=16, **BALANCED),
    "classes": TensorSpec(group=8, classes=((4, 1 / 4), (1, 1 / 2)), factors="norm"),
}
GAUSSIAN = TensorSpec(3, "channels", mapping="symmetric", codebook="gaussian", transform="hadamard")
TABLE = BlockTable(torch.tensor([[0, 30, 63], [0, 11, 11]]))


def segment(key: TensorSpec, value: TensorSpec) -> PackedSegment:
    torch.manual_seed(0)
    states = [torch.randn(BATCH, HEADS, 63, D) + torch.randn(D) for _ in range(2)]
    for x in states:
        x[1, :, 11:] = float("nan")
    made = (pack_tensor(x, s, TABLE) for x, s in zip(states, (key, value), strict=True))
    return PackedSegment(*made, TABLE.lengths, True)


def steps(kept: PackedSegment) -> Tensor:
    """Distance between neighbouring levels of every element of K, in the quantizer's basis."""
    key, (_, heads, tokens, _) = kept.key, kept.key.codes.shape
    out = torch.zeros(BATCH, heads, tokens, D)
    for b in range(BATCH):
        for t in range(int(kept.lengths[b])):
            block = int((key.blocks.offsets[b, 1:] <= t).sum())
            row = key.full_scale[b, :, t if key.per_token else block].float()
            if key.per_token:
                row = row.repeat_interleave(D // row.shape[-1], -1)
            elif (order := key.channel_order) is not None:
                row = torch.empty_like(row).scatter_(-1, order[b, :, block], row)
            if key.factor is not None:
                row = row * key.factor[b, :, block if key.per_token else t].float()
            out[b, :, t] = row
    return out


def naive(query: Tensor, kept: PackedSegment, dense: DenseSegment, sm_scale: float) -> Tensor:
    key, value = (kept.states(which).double() for which in ("key", "value"))
    widths, turn = steps(kept).double(), torch.eye(D, dtype=torch.float64)
    if kept.key.spec.transform:
        turn = hadamard(D)
    out = torch.zeros(query.shape, dtype=torch.float64)
    for b in range(BATCH):
        n = int(kept.lengths[b])
        for h in range(query.shape[1]):
            for i in range(query.shape[2]):
                q, g = query[b, h, i].double() * sm_scale, h // GROUP
                scores = key[b, g, :n] @ q
                if kept.key.spec.jensen:
                    noise = ((q @ turn) * widths[b, g, :n]).square() / 12
                    scores = scores - noise.sum(-1) / 2
                scores = torch.cat([scores, dense.key[b, g].double() @ q])
                values = torch.cat([value[b, g, :n], dense.value[b, g].double()])
                out[b, h, i] = scores.softmax(0) @ values
    return out


def compared(key: TensorSpec, value: TensorSpec) -> None:
    kept = segment(key, value)
    query = torch.randn(BATCH, HEADS * GROUP, 2, D)
    own = torch.randn(2, BATCH, HEADS, 5, D)
    dense = DenseSegment(*own, torch.tensor([5, 5]))
    found = attend(query, [kept, dense], sm_scale=0.4)
    torch.testing.assert_close(found.double(), naive(query, kept, dense, 0.4), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("value", [*TENSORS.values(), GAUSSIAN], ids=[*TENSORS, "gaussian"])
@pytest.mark.parametrize("key", [*TENSORS.values(), GAUSSIAN], ids=[*TENSORS, "gaussian"])
def test_factors_and_codebooks_are_read_from_codes(key: TensorSpec, value: TensorSpec) -> None:
    compared(key, value)


@pytest.mark.parametrize("name", TENSORS)
def test_scores_are_lowered_by_half_of_the_noise(name: str) -> None:
    compared(TENSORS[name].replace(jensen=True), TENSORS["plain"])


def test_the_mean_weight_of_quantized_keys_is_right() -> None:
    """Keys of zeros with random grids: noise is uniform, and the mean of exp(scores) is 1."""
    torch.manual_seed(1)
    groups = 1 << 14
    # Groups of two hidden ends and a 0, which lies anywhere in two of the cells between them.
    low = -(torch.rand(groups, 4).double() * 4 + 1) / 6
    x = torch.stack([low, low + 1, torch.zeros_like(low)], 1).view(1, 1, -1, 4)
    table = BlockTable(torch.tensor([[0, 3 * groups]]))
    seen = (torch.arange(3 * groups) % 3 == 2)[None, None]
    query = torch.tensor([[[[6.0, -5.0, 4.0, 5.0]]]], dtype=torch.float64)
    zero = torch.zeros(1, 1, 1, 4, dtype=torch.float64)
    value = pack_tensor(torch.ones_like(x), TensorSpec(8), table)

    def mass(jensen: bool) -> float:
        """Mean of exp(scores), from the share of a key of score 0 with another value."""
        spec = TensorSpec(2, group=3, jensen=jensen, param_dtype="float32")
        kept = PackedSegment(pack_tensor(x, spec, table), value, table.lengths, True, seen)
        dense = DenseSegment(zero, zero, torch.tensor([1]))
        share = attend(query, [kept, dense], sm_scale=1.0)[0, 0, 0, 0]
        return float(share / (1 - share)) / groups

    assert abs(mass(True) - 1) < 0.03
    assert mass(False) > 1.5


def test_long_chunks_are_corrected_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("duotone.attention.reference.MAX_SCORES", 600)
    kept = segment(TENSORS["plain"].replace(jensen=True), TENSORS["plain"])
    query, slow = torch.randn(BATCH, HEADS * GROUP, 7, D), SlowPaths()
    with pytest.warns(SlowPathWarning, match="jensen changes scores by query"):
        found = attend_chunk(query, [kept], sm_scale=1.0, slow=slow)
    assert torch.equal(found, attend(query, [kept], sm_scale=1.0))
    assert not torch.allclose(
        found, attend(query, [segment(*[TENSORS["plain"]] * 2)], sm_scale=1.0)
    )
    assert math.isfinite(float(found.sum()))
