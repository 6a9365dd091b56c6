"""`short_decode` on a real GPU against the reference: widths, shapes, spans, parts, graphs."""

from dataclasses import replace

import pytest
import torch
from cuda_calls import (
    assert_every_impl_is_near,
    assert_near_the_reference,
    assert_replays_take_new_queries,
    assert_sums_are_right,
)
from cuda_device import NEEDS_KERNELS

import duotone
from duotone.attention import decode_attention
from duotone.attention.choice import choose
from duotone.attention.cuda.shared.launch import run
from duotone.attention.cuda.short.decode import short_task
from duotone.attention.cuda.short.family import SHORT
from duotone.quant import KVSpec, TensorSpec

from cases import CALIBRATED, SMALL, UNITS, Case, assert_near_half, build, poisoned, reference

pytestmark = NEEDS_KERNELS
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def of(policy: KVSpec) -> dict[str, TensorSpec]:
    return {"key": policy.key, "value": policy.value}


LAYER = {bits: duotone.scheme("duotone", bits=bits).at_layer(1) for bits in (1, 2, 4)}
PRESETS = [of(x) for spec in LAYER.values() for x in (spec.visual, spec.background)]
HALVES, SPAN, BYTES = ({"key": k, "value": v} for k, v in (UNITS, CALIBRATED, SMALL))
PLAIN = {"key": TensorSpec(2), "value": TensorSpec(1)}
PLAIN_BYTES = {"key": TensorSpec(4, param_dtype="float8"), "value": SMALL[1]}
ROTATED = {name: x.replace(transform="hadamard") for name, x in SPAN.items()}
MANY = (49 * 66, 300, 0, 49)
CASES = [
    *(Case((81 * 40, 700), **specs, spans=40, gqa=gqa, kv_heads=2, head_dim=d, dtype=BF16)
      for specs in PRESETS for gqa, d in ((1, 64), (4, 128), (7, 128))),
    *(Case(MANY, **BYTES, spans=66, gqa=gqa, head_dim=64, dtype=FP16) for gqa in (1, 4, 6, 7, 12)),
    *(Case(MANY, **specs, spans=66, head_dim=d, dtype=FP16)
      for specs in (HALVES, SPAN, PLAIN, PLAIN_BYTES) for d in (64, 80, 96, 128)),
    *(Case(MANY, **BYTES, spans=66, gqa=gqa, head_dim=256, dtype=BF16) for gqa in (1, 2)),
    *(Case((n, 1), **BYTES, kv_heads=2, dtype=FP32) for n in (1, 31, 32, 33, 64, 97, 255, 256)),
    Case((20 * 160,), **HALVES, spans=160, gqa=1, kv_heads=32, dtype=BF16),
    Case((81 * 40,) * 16, **BYTES, spans=40, gqa=1, kv_heads=32, dtype=BF16),
    Case((81 * 40,) * 16, **BYTES, spans=40, gqa=4, kv_heads=8, head_dim=128, dtype=BF16),
    Case(MANY, **SPAN, spans=66, head_dim=128, dense=(40, 0, 700, 1), dtype=BF16),
    Case(MANY, **SPAN, spans=66, head_dim=128, dtype=BF16, key_norm=True),
    Case(MANY, **ROTATED, spans=66, head_dim=128, dtype=FP16),
    *(Case((700,), **SPAN, spans=9, head_dim=128, dtype=FP16, spread=x) for x in (100.0, 0.01)),
]  # fmt: skip
DENSE = Case((81 * 40, 90), **BYTES, spans=40, gqa=1, kv_heads=2, dense=(5, 9), dtype=BF16)


def as_packed(kv: list) -> list:
    return kv


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case: Case) -> None:
    query, kv = build(case)
    assert choose(query, kv).read[0][0] is SHORT
    assert_near_the_reference(case, as_packed)


@pytest.mark.parametrize("specs", [BYTES, PLAIN], ids=["classes", "plain"])
def test_sums_of_exponentials_are_right(specs) -> None:
    case = Case((700, 33), **specs, spans=10, kv_heads=1, head_dim=128, dtype=FP32)
    query, kv = build(case)
    out, lse = torch.empty_like(query), torch.full(query.shape[:2], float("nan"), device="cuda")
    run([short_task(query, kv[0])], case.sm_scale, out, lse)
    assert_sums_are_right(case, lse, query, kv[0].states("key"))


def test_wrong_parameters_are_noticed() -> None:
    query, kv = build(replace(DENSE, key=SPAN["key"], value=SPAN["value"]))
    segment, dense = kv
    for which, name in (("key", "scale"), ("key", "zero_point"), ("value", "scale")):
        x = getattr(segment, which)
        wrong = replace(x, **{name: getattr(x, name) * 1.5})
        given = [replace(segment, **{which: wrong}), dense]
        out = decode_attention(query, given, sm_scale=DENSE.sm_scale, impl="cuda")
        with pytest.raises(AssertionError, match="rms"):
            assert_near_half(out, reference(DENSE, query, kv))


def test_every_implementation_is_near() -> None:
    assert_every_impl_is_near(DENSE, as_packed)


@pytest.mark.parametrize("case", [DENSE, replace(DENSE, gqa=4, kv_heads=4)], ids=["few", "more"])
def test_replays_take_new_queries(case: Case) -> None:
    assert_replays_take_new_queries(case, as_packed)


def test_calibrated_scores_are_left_to_triton() -> None:
    case = Case((81 * 4,), **BYTES, spans=4, kv_heads=2, tau=(0.0, 3.0), dtype=BF16)
    query, kv = build(case)
    out = decode_attention(query, poisoned(kv), sm_scale=case.sm_scale, tau=case.tau)
    assert_near_half(out, reference(case, query, kv))
