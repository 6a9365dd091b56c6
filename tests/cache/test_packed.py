import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from duotone.cache import BlockTable, pack_tensor
from duotone.cache.blocks import single_block
from duotone.cache.ragged import concatenate, valid_mask
from duotone.quant import TensorSpec, quantize, tensor_bytes, unpack
from duotone.quant.slots import has_slot

SPECS = [
    TensorSpec(1),
    TensorSpec(2, group=8),
    TensorSpec(4, "channels", 16),
    TensorSpec(8, "channels"),
    TensorSpec(2, "span", levels="lloyd"),
    TensorSpec(1, group=32, mapping="symmetric"),
    TensorSpec(2, "channels", 24, mapping="hybrid"),
    TensorSpec(2, "channels", mapping="hybrid", param_dtype="float32"),
    TensorSpec(2, group=13, mapping="hybrid"),
    TensorSpec(1, group=32, mapping="hybrid", param_dtype="bfloat16"),
    TensorSpec(2, mapping="hybrid"),
    TensorSpec(4, "span", 16, mapping="hybrid"),
    TensorSpec(3, group=8, levels="lloyd"),
    TensorSpec(3, "channels", 24, mapping="hybrid"),
    TensorSpec(1, group=16, levels="lloyd", gain="fit", classes=((4, 1 / 8), (1, 1 / 2))),
    TensorSpec(1, group=9, classes=((3, 7 / 40), (1, 11 / 40))),
    TensorSpec(1, classes=((8, 1 / 40), (4, 1 / 5), (2, 1 / 40))),
    TensorSpec(2, group=13, param_dtype="float8"),
    TensorSpec(levels="lloyd", energy=1.0, classes=((4, 1 / 5), (1, 1 / 2)), param_dtype="float8"),
]
D = 40


def spec_id(spec: TensorSpec) -> str:
    classes = "-classes" if spec.classes else ""
    return f"{spec.bits}b-{spec.along}-g{spec.group}-{spec.mapping}{classes}"


def states(batch: int, tokens: int, seed: int = 0) -> Tensor:
    return torch.randn(batch, 2, tokens, D, generator=torch.Generator().manual_seed(seed))


def valid(x: Tensor, lengths: Tensor) -> Tensor:
    return x.masked_fill(~valid_mask(lengths, x.shape[2])[:, None, :, None], 0)


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_each_span_has_ranges_of_its_own(spec: TensorSpec) -> None:
    table = BlockTable(torch.tensor([[0, 30, 63], [0, 11, 11]]))
    x = states(2, 63)
    x[1, :, 11:] = float("nan")
    packed = pack_tensor(x, spec, table)
    for b, start, stop in ((0, 0, 30), (0, 30, 63), (1, 0, 11)):
        alone = quantize(x[b, :, start:stop], spec).dequantize()
        # Means are summed in another order beside padding: the last bit of fp16 may differ.
        assert torch.allclose(packed.dequantize()[b, :, start:stop], alone, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_tensors_hold_no_more_than_they_count(spec: TensorSpec) -> None:
    packed = pack_tensor(states(2, 63), spec, single_block(torch.tensor([63, 63])))
    for name in packed.tensor_names():
        tensor = getattr(packed, name)
        assert tensor.is_contiguous(), name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_appending_spans_equals_packing_them_at_once(spec: TensorSpec) -> None:
    first, second = torch.tensor([30, 0, 7]), torch.tensor([5, 20, 0])
    x, y = states(3, 30), states(3, 20, seed=1)
    a, b = pack_tensor(x, spec, single_block(first)), pack_tensor(y, spec, single_block(second))
    joined = a.append(b, concatenate(first, second, 30))
    for i, (n, m) in enumerate(zip(first.tolist(), second.tolist(), strict=True)):
        expected = torch.cat([a.dequantize()[i, :, :n], b.dequantize()[i, :, :m]], 1)
        assert torch.equal(joined.dequantize()[i, :, : n + m], expected)


@given(st.sampled_from(SPECS), st.integers(1, 70), st.integers(0, 70))
def test_truncate_keeps_codes_and_ranges(spec: TensorSpec, tokens: int, keep: int) -> None:
    keep = min(keep, tokens)
    whole = pack_tensor(states(1, tokens), spec, single_block(torch.tensor([tokens])))
    cut = whole.truncate(torch.tensor([keep]))
    assert cut.tokens == keep
    if keep:
        assert torch.equal(cut.dequantize(), whole.dequantize()[:, :, :keep])


@pytest.mark.parametrize("spec", SPECS, ids=spec_id)
def test_rows_picks_and_trims(spec: TensorSpec) -> None:
    lengths = torch.tensor([30, 4])
    packed = pack_tensor(states(2, 30), spec, single_block(lengths))
    index = torch.tensor([1, 1])
    picked = packed.rows(index)
    assert picked.tokens == 4
    assert torch.equal(picked.dequantize(), packed.dequantize()[index][:, :, :4])


@given(st.sampled_from(SPECS), st.integers(1, 100), st.integers(1, 3))
def test_bytes_are_what_the_formula_says(spec: TensorSpec, tokens: int, batch: int) -> None:
    packed = pack_tensor(states(batch, tokens), spec, single_block(torch.tensor([tokens] * batch)))
    codes_bytes, params_bytes = tensor_bytes(spec, tokens, D)
    assert packed.codes_bytes == codes_bytes * 2 * batch
    assert packed.params_bytes == params_bytes * 2 * batch


HYBRIDS = [spec for spec in SPECS if spec.mapping == "hybrid"]


@pytest.mark.parametrize("spec", HYBRIDS, ids=spec_id)
def test_a_hybrid_has_slots_or_planes_and_both_modes(spec: TensorSpec) -> None:
    x = states(2, 63)
    # All of one sign for some groups, which asymmetric levels suit better.
    x[:, 0] = x[:, 0].abs() + 1
    packed = pack_tensor(x, spec, single_block(torch.tensor([63, 63])))
    apart = packed.zero_point is not None and packed.negative is not None
    assert (packed.slot is not None) == has_slot(spec) == (not apart)
    modes = unpack(packed.symmetric, 1, packed.scale.shape[-1]).bool()
    assert modes.any()
    assert not modes.all()
    assert (packed.offset[modes] == 0).all()
    assert packed.signs().any()
    assert (x[packed.signs()] < 0).all()


@given(st.sampled_from(HYBRIDS), st.integers(1, 70), st.integers(0, 99))
def test_a_packed_hybrid_is_no_worse_than_either_mode(
    spec: TensorSpec, tokens: int, seed: int
) -> None:
    x, table = states(1, tokens, seed), single_block(torch.tensor([tokens]))

    def error(mapping: str) -> Tensor:
        packed = pack_tensor(x, spec.replace(mapping=mapping), table)
        return (packed.dequantize() - x).abs().sum()

    best = torch.minimum(error("asymmetric"), error("symmetric"))
    assert error("hybrid") <= best * (1 + 1e-5)


@pytest.mark.parametrize("along", ["tokens", "channels"])
def test_a_truncated_hybrid_grows_again(along: str) -> None:
    spec = TensorSpec(2, along, 16, mapping="hybrid")
    a = pack_tensor(states(2, 40), spec, single_block(torch.tensor([40, 23])))
    b = pack_tensor(states(2, 9, seed=1), spec, single_block(torch.tensor([9, 4])))
    kept = torch.tensor([21, 20])
    joined = a.truncate(kept).append(b, concatenate(kept, torch.tensor([9, 4]), 21))
    for i, (n, m) in enumerate(((21, 9), (20, 4))):
        expected = torch.cat([a.dequantize()[i, :, :n], b.dequantize()[i, :, :m]], 1)
        assert torch.equal(joined.dequantize()[i, :, : n + m], expected)
