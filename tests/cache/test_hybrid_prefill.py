"""InnerQ's hybrid-prefill: groups of a prompt choose their mode, groups of a decode step do not."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duotone.cache import LayerStore, Ledger
from duotone.quant import CacheSpec, KVSpec, TensorSpec, quantize, unpack

BATCH, HEADS, DIM = 2, 2, 20
PREFILL = {"mapping": "hybrid", "hybrid_at": "prefill"}
# Along channels and tokens with slots; the span keeps zero_points and a plane of signs.
KINDS = {
    "inner": (TensorSpec(2, "channels", 8), TensorSpec(2, "tokens", 4)),
    "span": (TensorSpec(1, "span", 4), TensorSpec(4, "span", 4)),
}


def spec_of(kind: str, **fields: str) -> CacheSpec:
    key, value = (tensor.replace(**fields) for tensor in KINDS[kind])
    return CacheSpec(visual="text", text=KVSpec(key, value), sink=2, recent=3, key_norm=True)


def fed(spec: CacheSpec, sizes: list[int]) -> tuple[LayerStore, Tensor]:
    """(store, [tokens of the stream] True where they left the window at a decode step)."""
    ledger, store = Ledger(spec, BATCH, torch.device("cpu")), LayerStore(spec)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, BATCH, HEADS, sum(sizes), DIM, generator=generator)
    # Groups of one sign, which asymmetric levels suit better.
    x = torch.where(torch.arange(DIM) < 8, x.abs() + 2, x)
    x[:, :, 0] = x[:, :, 0].abs() + 2
    decoded = []
    for key, value in zip(*(t.split(sizes, 2) for t in x), strict=True):
        real = torch.ones(BATCH, key.shape[2], dtype=torch.bool)
        plan = ledger.plan(~real, real)
        store.apply(plan, key, value)
        for flush, decodes in ((plan.flush_first, True), (plan.flush_last, False)):
            decoded += [decodes] * (flush.piece.take.tokens if flush else 0)
    return store, torch.tensor(decoded)


def modes(packed) -> Tensor:
    """Mode of every token, or of the groups along its channels: True if symmetric."""
    rows = unpack(packed.symmetric, 1, packed.scale.shape[-1]).bool()
    return rows if packed.per_token else packed._per_element(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "sizes", [[20] + [1] * 17, [1] * 30, [17, 1, 1, 1, 1, 1, 9, 1, 1, 1, 1, 1, 1], [40]]
)
def test_prompts_are_hybrid_and_decode_steps_symmetric(kind: str, sizes: list[int]) -> None:
    ours, decoded = fed(spec_of(kind, **PREFILL), sizes)
    hybrid, same = fed(spec_of(kind, mapping="hybrid"), sizes)
    symmetric, _ = fed(spec_of(kind, mapping="symmetric"), sizes)
    assert torch.equal(decoded, same)
    for which in ("key", "value"):
        mine, chosen, plain = (getattr(s.stream, which) for s in (ours, hybrid, symmetric))
        want = torch.where(decoded[:, None], plain.dequantize(), chosen.dequantize())
        assert torch.equal(mine.dequantize(), want)
        assert modes(mine)[:, :, decoded].all()
        assert torch.equal(modes(mine)[:, :, ~decoded], modes(chosen)[:, :, ~decoded])
        assert not modes(chosen)[:, :, decoded].all() or not decoded.any()
        assert (mine.codes_bytes, mine.params_bytes) == (chosen.codes_bytes, chosen.params_bytes)
        assert mine.spec.hybrid_at == "prefill"


@pytest.mark.parametrize("kind", KINDS)
def test_within_a_phase_pieces_equal_all_at_once(kind: str) -> None:
    """Across the phases they cannot: the same tokens, decoded, are symmetric."""
    spec = spec_of(kind, **PREFILL).replace(key_norm=False)
    found = [fed(spec, sizes)[0].stream for sizes in ([40], [9, 2, 13, 16])]
    steps = fed(spec, [1] * 40)[0].stream
    for which in ("key", "value"):
        whole, pieces, single = (getattr(pair, which).dequantize() for pair in (*found, steps))
        assert torch.equal(whole, pieces)
        tokens = single.shape[2]
        assert not torch.equal(whole[:, :, :tokens], single)


@given(st.sampled_from(sorted(KINDS)), st.integers(1, 30), st.integers(0, 99))
def test_a_decode_step_gives_what_the_symmetric_mapping_gives(kind, tokens, seed) -> None:
    x = torch.randn(HEADS, tokens, DIM, generator=torch.Generator().manual_seed(seed)) + 1
    for tensor in KINDS[kind]:
        spec = tensor.replace(**PREFILL)
        plain = quantize(x, tensor.replace(mapping="symmetric"))
        ours = quantize(x, spec, decoding=True)
        assert torch.equal(ours.codes, plain.codes)
        assert torch.equal(ours.negative, plain.negative)
        assert torch.equal(ours.scale, plain.scale)
        assert ours.symmetric.all()
        assert not ours.zero_point.any()
        again = quantize(x, spec.replace(hybrid_at="always"), decoding=True)
        assert torch.equal(again.codes, quantize(x, spec).codes)
