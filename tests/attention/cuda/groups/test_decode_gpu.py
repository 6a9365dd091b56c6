"""`group_decode` on a real GPU against the reference: axes, widths, signs, shapes, splits."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from cuda_calls import assert_sums_are_right
from cuda_device import NEEDS_KERNELS

from duotone.attention.cuda.groups.decode import group_task, warps_of
from duotone.attention.cuda.groups.format import GroupFormat, operand_of
from duotone.attention.cuda.groups.layout import to_group_records
from duotone.attention.cuda.groups.records import GroupRecords
from duotone.attention.cuda.shared.launch import run
from duotone.quant import TensorSpec

from cases import Case, assert_near, build, poisoned, reference

pytestmark = NEEDS_KERNELS
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ODD = (3329, 100, 63, 1)


def kivi(bits: int, group: int = 32) -> dict[str, TensorSpec]:
    return {"key": TensorSpec(bits, "tokens", group), "value": TensorSpec(bits, "channels", group)}


def inner(bits: int, mapping: str = "asymmetric") -> dict[str, TensorSpec]:
    return {
        "key": TensorSpec(bits, "channels", 32, mapping),
        "value": TensorSpec(bits, "tokens", 32, mapping),
    }


CASES = [
    *(Case(ODD, **kivi(bits), kv_heads=2, head_dim=128, dtype=BF16) for bits in (1, 2, 4)),
    *(Case(ODD, **inner(bits, mapping), kv_heads=2, head_dim=128, dtype=BF16)
      for bits, mapping in product((1, 2, 4), ("asymmetric", "symmetric", "hybrid"))),
    *(Case(ODD, **kivi(2), gqa=gqa, head_dim=128, dtype=FP16) for gqa in (1, 6, 7, 8, 16)),
    *(Case(ODD, **kivi(1), gqa=gqa, head_dim=d, dtype=FP16) for gqa, d in ((12, 96), (16, 256))),
    *(Case(ODD, **kivi(2), head_dim=d, dtype=FP16) for d in (64, 96, 256)),
    *(Case(ODD, **inner(2, "hybrid"), head_dim=d, dtype=FP32) for d in (64, 256)),
    Case(ODD, **kivi(2, 64), head_dim=128, dtype=BF16),
    Case(ODD, TensorSpec(2, "tokens", 32), TensorSpec(4, "tokens", 64), head_dim=128, dtype=BF16),
    Case(ODD, TensorSpec(1, "channels"), TensorSpec(2, "channels", 64), head_dim=128, dtype=FP16),
    Case((20_000,), **kivi(2), head_dim=128, dtype=BF16),
    Case((100,) * 40, **inner(2, "hybrid"), kv_heads=8, head_dim=128, dtype=BF16),
    # More units than places.
    *(Case((100, 1, 32, 300, 33) * 20, **specs, gqa=gqa, kv_heads=8, head_dim=128, dtype=BF16)
      for specs in (kivi(2), inner(2, "hybrid")) for gqa in (1, 4, 6)),
]  # fmt: skip


def records_of(segment):
    key, value = segment.key, segment.value
    both = ((key, "key"), (value, "value"))
    form = GroupFormat(key.head_dim, *(operand_of(x.spec, x.head_dim, name) for x, name in both))
    return GroupRecords(form, to_group_records(key, value, form))


def decode(query, kv, sm_scale):
    """(output, lse) of one packed segment."""
    (segment,) = kv
    records = records_of(segment)
    assert warps_of(records.format, query.shape[1] // records.shape[1])
    out = torch.full(query.shape, float("nan"), device=query.device)
    lse = torch.full(query.shape[:2], float("nan"), device=query.device)
    run([group_task(query, replace(segment, records=records))], sm_scale, out, lse)
    return out.to(query.dtype), lse


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case: Case) -> None:
    query, kv = build(case)
    out, lse = decode(query, poisoned(kv), case.sm_scale)
    expected = reference(case, query, kv)
    assert_near(*(x.half() if case.dtype == FP32 else x for x in (out, expected)))
    assert torch.isfinite(lse).all()


def test_sums_of_exponentials_are_right() -> None:
    case = Case((700, 33), **kivi(2), kv_heads=1, head_dim=64, dtype=FP32)
    query, kv = build(case)
    _, lse = decode(query, kv, case.sm_scale)
    assert_sums_are_right(case, lse, query, kv[0].states("key"))


def test_wrong_scales_are_noticed() -> None:
    case = Case((300,), **kivi(2), head_dim=128, dtype=BF16)
    query, kv = build(case)
    kv[0].key.scale.mul_(1.2)
    out, _ = decode(query, kv, case.sm_scale)
    kv[0].key.scale.div_(1.2)
    with pytest.raises(AssertionError, match="rms"):
        assert_near(out, reference(case, query, kv))
