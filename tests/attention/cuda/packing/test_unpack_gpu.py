"""Packed tokens dequantized on a real GPU, bit for bit as torch does it in canonical order."""

from dataclasses import replace

import pytest
import torch
from class_pack_cases import CLASS_CASES, ClassCase, class_states
from cuda_device import NEEDS_KERNELS
from group_specs import CASES
from unpacked import assert_unpacked, segment_of

import duotone
from duotone.attention.cuda.classes.pack import class_pack
from duotone.attention.cuda.groups.records import GroupLayout
from duotone.attention.cuda.short.pack import short_pack
from duotone.attention.cuda.spans.layout import WIDTHS, Records
from duotone.attention.cuda.spans.stored import stored
from duotone.cache import BlockTable, pack_tensor
from duotone.cache.pair import PackedPair
from duotone.quant import KVSpec, TensorSpec

from cases import SMALL, device, states
from pack_cases import dense_states, taken_anywhere

pytestmark = NEEDS_KERNELS
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("case", CLASS_CASES, ids=str)
def test_class_records(case: ClassCase) -> None:
    key, value, piece = class_states(case)
    right = segment_of(class_pack(key, value, case.spec, piece))
    assert_unpacked(right)
    wrong = replace(right.records, data=right.records.data ^ 1)
    with pytest.raises(AssertionError):
        assert_unpacked(replace(right, records=wrong), of=right)


SPAN_SPECS = [
    *(TensorSpec(bits, group=128) for bits in WIDTHS),
    *(duotone.scheme("duotone", bits=4).visual.key.replace(bits=bits) for bits in (1, 2, 4)),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", SPAN_SPECS, ids=lambda spec: f"{spec.levels} {spec.bits}")
def test_span_records(spec: TensorSpec, dtype: torch.dtype) -> None:
    """As the packing kernels write them."""
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1300, 3330], [0, 257, 257]], device=device())
    key, value = (dense_states((2, 2, 3359, 128), dtype, 0) for _ in range(2))
    right = segment_of(stored(key, value, KVSpec(spec, spec), taken_anywhere(edges, 3359)))
    assert isinstance(right.records, Records)
    assert_unpacked(right)
    wrong = replace(right.records, data=right.records.data ^ 1)
    with pytest.raises(AssertionError):
        assert_unpacked(replace(right, records=wrong), of=right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_group_records(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = BlockTable(torch.tensor([[0, n] for n in (3330, 0, 96)], device=device()))
    x = states(3, 2, 3330, 128).to(device(), dtype)
    pair = PackedPair(*(pack_tensor(x, spec, table) for spec in CASES[name]))
    for lends in ((), ("key",)):
        laid = pair.laid_out(GroupLayout(frozenset(lends)))
        if laid.records is not None:
            assert_unpacked(segment_of(laid), of=segment_of(pair))
    assert pair.laid_out(GroupLayout()).records is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("edges", [((0, 81, 162), (0, 30, 30)), ((0, 1),), ((0, 42, 70),)])
def test_short_spans(edges, head_dim: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    offsets = torch.tensor(edges, device=device())
    shape = (len(edges), 2, int(offsets.max()) + 29, head_dim)
    key, value = (dense_states(shape, dtype, 0) for _ in range(2))
    policies = (duotone.scheme("duotone", bits=1).background, KVSpec(*SMALL))
    for spec in policies:
        pair = short_pack(key, value, spec, taken_anywhere(offsets, shape[2]))
        assert_unpacked(segment_of(pair))
