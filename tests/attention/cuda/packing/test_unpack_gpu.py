"""Records dequantized on a real GPU, bit for bit as torch does it from the canonical order."""

from dataclasses import replace

import pytest
import torch
from class_pack_cases import CLASS_CASES, ClassCase, class_states
from cuda_device import NEEDS_KERNELS
from group_specs import CASES

from duotone.attention.cuda.classes.pack import class_pack
from duotone.attention.cuda.groups.records import GroupLayout
from duotone.cache import BlockTable, pack_tensor
from duotone.cache.pair import PackedPair

from cases import device, states

pytestmark = NEEDS_KERNELS


def assert_equal_to_torch(pair: PackedPair, of: PackedPair | None = None) -> None:
    """of: a pair with these tokens; None: `pair`."""
    own = (of or pair).canonical()
    found = pair.records.dequantized(pair.key, pair.value)
    for x, want in zip(found, (own.key, own.value), strict=True):
        expected = want.dequantize()
        assert (x.dtype, x.shape) == (expected.dtype, expected.shape)
        for b, n in enumerate(want.blocks.lengths.tolist()):
            assert torch.equal(x[b, :, :n], expected[b, :, :n])


@pytest.mark.parametrize("case", CLASS_CASES, ids=str)
def test_class_records(case: ClassCase) -> None:
    key, value, piece = class_states(case)
    pair = class_pack(key, value, case.spec, piece)
    assert_equal_to_torch(pair)
    wrong = replace(pair.records, data=pair.records.data ^ 1)
    with pytest.raises(AssertionError):
        assert_equal_to_torch(replace(pair, records=wrong), pair)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["kivi", "kivi4", "wide-groups"])
def test_group_records(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    table = BlockTable(torch.tensor([[0, n] for n in (3330, 0, 96)], device=device()))
    x = states(3, 2, 3330, 128).to(device(), dtype)
    pair = PackedPair(*(pack_tensor(x, spec, table) for spec in CASES[name]))
    laid = pair.laid_out(GroupLayout())
    assert laid.records is not None
    assert_equal_to_torch(laid)
