"""Packed tensors with factors, codebooks or shared ranges: spans, joins, cuts, bytes, buffers."""

import pytest
import torch
from torch import Tensor

from duotone.cache import BlockTable, LayerStore, Ledger, StaticPlaces, StaticStore, flush_all
from duotone.cache.blocks import single_block
from duotone.cache.packing import pack_groups, pack_tensor
from duotone.cache.ragged import concatenate
from duotone.quant import CacheSpec, KVSpec, TensorSpec, tensor_bytes
from duotone.quant.accounting import token_bytes

BALANCED = {"factors": "balanced", "transform": "hadamard"}
SPECS = {
    "norms": TensorSpec(2, group=8, factors="norm", grid="zero"),
    "token factors": TensorSpec(4, group=16, **BALANCED),
    "token factors, whole span": TensorSpec(4, **BALANCED),
    "channel factors": TensorSpec(2, "channels", tile=16, **BALANCED),
    "channel factors, groups": TensorSpec(2, "channels", 8, tile=16, **BALANCED),
    "channel factors, whole span": TensorSpec(2, "channels", **BALANCED),
    "gaussian": TensorSpec(3, "channels", mapping="symmetric", codebook="gaussian"),
    "gaussian along tokens": TensorSpec(2, group=8, mapping="symmetric", codebook="gaussian"),
    "clipped": TensorSpec(2, "channels", clip=0.9),
    "tokens by themselves": TensorSpec(2, group=1),
    "tiles of one token": TensorSpec(2, "channels", tile=1, **BALANCED),
    "one range for all heads": TensorSpec(2, "span", 8, heads="all", ties="even"),
}
HEADS, D = 2, 32
SPANS = "one range for all heads"
each = pytest.mark.parametrize("name", SPECS)


def states(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, HEADS, tokens, D, generator=torch.Generator().manual_seed(seed))


def same_codes(a: Tensor, b: Tensor) -> bool:
    """True where no code differs: rotations of other counts may round otherwise, a code is .1."""
    return torch.allclose(a, b, rtol=0, atol=1e-5)


@pytest.mark.usefixtures("poison")
@each
def test_each_span_has_factors_of_its_own(name: str) -> None:
    table = BlockTable(torch.tensor([[0, 30, 63], [0, 11, 11]]))
    x = states(2, 63)
    x[1, :, 11:] = float("nan")
    packed = pack_tensor(x, SPECS[name], table)
    for b, start, stop in ((0, 0, 30), (0, 30, 63), (1, 0, 11)):
        one = single_block(torch.tensor([stop - start]))
        alone = pack_tensor(x[b : b + 1, :, start:stop], SPECS[name], one).dequantize()[0]
        assert torch.allclose(packed.dequantize()[b, :, start:stop], alone, rtol=1e-3, atol=1e-4)


@each
def test_appending_equals_packing_apart(name: str) -> None:
    first, second = torch.tensor([30, 0, 7]), torch.tensor([5, 20, 0])
    a, b = (
        pack_tensor(states(3, n, n), SPECS[name], single_block(lengths))
        for n, lengths in ((30, first), (20, second))
    )
    joined = a.append(b, concatenate(first, second, 30))
    for i, (n, m) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        expected = torch.cat([a.dequantize()[i, :, :n], b.dequantize()[i, :, :m]], 1)
        assert same_codes(joined.dequantize()[i, :, : n + m], expected)


@each
def test_cuts_keep_codes_and_factors(name: str) -> None:
    whole = pack_tensor(states(2, 40), SPECS[name], single_block(torch.tensor([40, 21])))
    cut = whole.truncate(torch.tensor([19, 19]))
    assert same_codes(cut.dequantize(), whole.dequantize()[:, :, :19])
    picked = whole.rows(torch.tensor([1]))
    assert same_codes(picked.dequantize(), whole.dequantize()[1:, :, :21])


@each
@pytest.mark.parametrize("tokens", [1, 16, 35])
def test_bytes_are_what_the_formulas_say(name: str, tokens: int) -> None:
    packed = pack_tensor(states(3, tokens), SPECS[name], single_block(torch.tensor([tokens] * 3)))
    codes, params = tensor_bytes(SPECS[name], tokens, D)
    assert packed.codes_bytes == 3 * HEADS * codes
    shared = token_bytes(SPECS[name], tokens)
    assert packed.params_bytes == 3 * (HEADS * params + shared)
    assert (shared > 0) is (name == "norms")


@pytest.mark.parametrize("name", [name for name, s in SPECS.items() if s.block_tokens is not None])
def test_whole_groups_are_packed_as_blocks_are(name: str, monkeypatch) -> None:
    x, spec = states(2, 32), SPECS[name]
    whole = pack_tensor(x, spec, single_block(torch.tensor([32, 32])))
    # A captured step may not wait for the device.
    for method in ("split", "append", "is_whole"):
        monkeypatch.setattr(BlockTable, method, None)
    parts = pack_groups(x, spec)
    assert set(parts) == set(whole.tensor_names())
    for part, tensor in parts.items():
        assert torch.equal(tensor, getattr(whole, part)), part


def test_one_range_covers_all_heads() -> None:
    x = states(2, 20) + torch.tensor([0.0, 5.0])[:, None, None]
    made = pack_tensor(x, TensorSpec(4, "span", heads="all"), single_block(torch.tensor([20, 20])))
    for sequence, found in zip(x, made.dequantize(), strict=True):
        low, high = float(sequence.min()), float(sequence.max())
        assert abs(float(found.min()) - low) < 0.01
        assert abs(float(found.max()) - high) < 0.02
        assert float((found - sequence).abs().max()) <= (high - low) / 30 + 0.01
    assert torch.equal(made.scale[:, 0], made.scale[:, 1])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("token factors", "channel factors"),
        ("norms", "gaussian"),
        ("norms", SPANS),
        ("tokens by themselves", "tiles of one token"),
    ],
)
@pytest.mark.parametrize("recent", [0, 2])
def test_fixed_buffers_decode_as_growing_ones(key: str, value: str, recent: int) -> None:
    text = KVSpec(SPECS[key], SPECS[value])
    spec = CacheSpec(visual="text", text=text, sink=3, recent=recent, flush=16, scale_keys="never")
    ledger, store = Ledger(spec, 2, torch.device("cpu")), LayerStore(spec)
    real = torch.ones(2, 40, dtype=torch.bool)
    prompt = states(2, 40), states(2, 40, 1)
    store.apply(ledger.plan(~real, real), *prompt)
    places, order = StaticPlaces.of(ledger.state, spec, 40)
    static, one = StaticStore(store, places, order), torch.ones(2, 1, dtype=torch.bool)
    for step in range(40):
        plan = ledger.plan(~one, one)
        flush_all([static])
        places.advance()
        new = states(2, 1, 2 + step), states(2, 1, 99 + step)
        static.write(*new)
        store.apply(plan, *new)
    assert int(ledger.state.stream.lengths[0]) >= 64
    for ours, theirs in zip(static.segments, store.segments(ledger.state), strict=True):
        n = int(theirs.lengths[0])
        for which in ("key", "value"):
            assert torch.allclose(
                ours.states(which)[:, :, :n], theirs.states(which)[:, :, :n], atol=1e-6
            )
