"""The Triton path on a real GPU: all shapes and schemes, graphs, no hidden compilation or sync."""

from itertools import product

import pytest
import torch
from cuda_device import no_waits

from duotone.attention import decode_attention
from duotone.quant import TensorSpec

from cases import (
    CLASSES_KEY,
    CLASSES_VALUE,
    INNERQ_KEY,
    INNERQ_VALUE,
    PRESET_KEY,
    ROTATED_KEY,
    ROTATED_VALUE,
    SMALL,
    SMALL_TILES,
    Case,
    assert_near,
    build,
    poisoned,
    reference,
)

pytest.importorskip("triton", reason="the Triton path needs triton")

from duotone.attention.triton.decode import decode_attention_triton
from duotone.attention.triton.kernels import merge_kernel, segment_kernel
from duotone.attention.triton.prepare import class_order_kernel, fold_kernel
from duotone.attention.triton.range import score_range_kernel

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ODD = (3329, 100, 63, 1)
TAU = (0.0, 3.0)
CLASSES = (CLASSES_KEY, CLASSES_VALUE)
INNERQ = (INNERQ_KEY, INNERQ_VALUE)


def along(bits: int, kind: str, mapping: str = "asymmetric") -> TensorSpec:
    """A tensor spec by a short name: "whole", "t32", "c32", "c7", "row", "span"."""
    if kind == "whole":
        return TensorSpec(bits, mapping=mapping)
    if kind == "span":
        return TensorSpec(bits, "span", mapping=mapping)
    if kind == "row":
        return TensorSpec(bits, "channels", mapping=mapping)
    return TensorSpec(bits, {"t": "tokens", "c": "channels"}[kind[0]], int(kind[1:]), mapping)


def pair(bits: int, key: str, value: str, mapping: str = "asymmetric") -> dict[str, TensorSpec]:
    return {"key": along(bits, key, mapping), "value": along(bits, value, mapping)}


# (bits, K, V): where scales lie.
PLACES = [
    (1, "row", "row"), (2, "t32", "c32"), (2, "c32", "t32"), (2, "c32", "c32"), (4, "c32", "row"),
    (8, "c64", "c32"), (1, "c6", "c7"), (1, "span", "span"), (4, "t64", "t24"),
    (2, "whole", "row"), (4, "row", "whole"),
]  # fmt: skip
SIGNED_PLACES = [
    (2, "c32", "t32"), (2, "t32", "c32"), (2, "c32", "c32"), (2, "t32", "t32"), (1, "c64", "t64"),
    (4, "t64", "c64"), (2, "row", "whole"), (1, "whole", "row"), (2, "whole", "whole"),
    (8, "row", "row"), (2, "c6", "t24"), (1, "t300", "span"), (4, "c12", "t7"),
]  # fmt: skip
SMALL_2 = TensorSpec(2, param_dtype="float8")
WIDE_SCALES = (
    TensorSpec(1, param_dtype="float32"),
    TensorSpec(2, "channels", param_dtype="bfloat16"),
    TensorSpec(2, "channels", 32, param_dtype="float32"),
)
WIDE_SIGNED = (
    along(2, "t32", "hybrid").replace(param_dtype="float32"),
    along(2, "c32", "hybrid").replace(param_dtype="bfloat16"),
    along(2, "row", "symmetric").replace(param_dtype="float32"),
)
CASES = [
    # Every width, with and without calibration.
    *(Case(ODD, **pair(bits, "whole", "whole"), kv_heads=2, head_dim=128, tau=tau, dtype=BF16)
      for bits, tau in product((1, 2, 4, 8), (None, TAU))),
    # GQA groups.
    *(Case(ODD, gqa=gqa, kv_heads=2, head_dim=128, tau=TAU, dtype=BF16) for gqa in (1, 6, 7, 16)),
    # Head dims, powers of two or not, and a value_dim of its own.
    *(Case(ODD, **pair(bits, "whole", "whole"), head_dim=d, dtype=FP16, tau=TAU)
      for bits, d in product((1, 4), (64, 80, 96, 256, 512))),
    *(Case(ODD, **pair(2, "t32", "c32", mapping), gqa=8, head_dim=512, dense=(40, 0, 700, 1),
           dtype=BF16)
      for mapping in ("asymmetric", "symmetric")),
    Case(ODD, **pair(4, "row", "row"), gqa=8, head_dim=512, mask=True, dtype=BF16, tau=TAU),
    Case(ODD, head_dim=128, value_dim=64, dtype=BF16),
    Case(ODD, head_dim=96, value_dim=128, dtype=FP16, tau=(2.0, 0.0)),
    # Where scales lie.
    *(Case(ODD, **pair(bits, key, value), head_dim=128, dtype=BF16, tau=tau)
      for (bits, key, value), tau in zip(PLACES, [None, TAU] * 6, strict=False)),
    Case(ODD, TensorSpec(1), TensorSpec(4), head_dim=128, dtype=BF16),
    Case(ODD, TensorSpec(8), TensorSpec(2), head_dim=128, dtype=FP16, tau=TAU),
    # Several spans, cut into groups or not.
    Case(ODD, **pair(1, "whole", "whole"), spans=13, head_dim=128, dtype=BF16, tau=TAU),
    Case(ODD, **pair(2, "t32", "t100"), spans=5, head_dim=128, dtype=FP16),
    Case((3329, 700), **pair(1, "whole", "whole"), spans=200, head_dim=128, dtype=BF16),
    Case(ODD, **pair(1, "t300", "c32"), spans=2, head_dim=128, dtype=BF16, tau=TAU),
    Case(ODD, **pair(1, "span", "t16"), spans=3, head_dim=64, dtype=BF16, mask=True),
    # Masks, and dense segments beside packed ones.
    *(Case(ODD, **pair(bits, "whole", "whole"), kv_heads=2, head_dim=128, mask=True,
           dense=(40, 0, 700, 1), dense_dtype=dense_dtype, tau=TAU, dtype=dtype)
      for bits, dtype, dense_dtype in (
          (1, BF16, BF16), (2, FP16, FP16), (4, BF16, FP32), (1, FP32, FP32), (2, FP32, BF16))),
    # fp32 queries.
    Case(ODD, **pair(1, "whole", "whole"), head_dim=128, dtype=FP32, tau=TAU),
    Case(ODD, **pair(2, "t32", "c32"), head_dim=128, dtype=FP32),
    Case(ODD, **pair(4, "row", "row"), head_dim=80, gqa=7, dtype=FP32, tau=TAU),
    Case(ODD, **pair(8, "whole", "whole"), head_dim=64, dtype=FP32),
    # Scales beyond fp16.
    *(Case(ODD, spec, spec, head_dim=128, spread=1e5, dtype=BF16) for spec in WIDE_SCALES),
    # Unequal channels in K, in V, in both: head dims, groups, GQA, masks, types.
    *(Case(ODD, PRESET_KEY.replace(group=group), spans=spans, head_dim=d, dtype=BF16, tau=tau)
      for d, group, spans, tau in (
          (64, 64, 1, None), (80, 100, 3, TAU), (96, 32, 5, None), (128, 64, 1, TAU),
          (128, 64, 13, None), (128, None, 3, TAU), (256, 128, 1, TAU))),
    *(Case(ODD, *CLASSES, gqa=gqa, kv_heads=2, head_dim=128, tau=tau, dtype=BF16)
      for gqa, tau in ((1, None), (4, TAU), (6, None), (7, TAU))),
    *(Case(ODD, key, CLASSES_VALUE.replace(group=g), spans=3, head_dim=d, mask=True, dtype=FP16)
      for key, g, d in (
          (TensorSpec(1), None, 64), (TensorSpec(2, "channels", 32), 100, 128),
          (CLASSES_KEY, 64, 256))),
    Case(ODD, PRESET_KEY, kv_heads=2, head_dim=128, dense=(40, 0, 700, 1), dtype=BF16, mask=True),
    Case(ODD, PRESET_KEY, CLASSES_VALUE, head_dim=128, dtype=FP32, tau=TAU, spans=4),
    Case(ODD, *CLASSES, head_dim=80, value_dim=96, dtype=FP32),
    Case(ODD, PRESET_KEY.replace(classes=((8, 1 / 8), (1, 3 / 8))), head_dim=128, dtype=BF16),
    Case(ODD, PRESET_KEY.replace(param_dtype="float32"),
         CLASSES_VALUE.replace(param_dtype="bfloat16"), head_dim=128, spread=1e5, dtype=BF16),
    # Parameters in 8 bits.
    *(Case(ODD, *specs, gqa=gqa, kv_heads=2, head_dim=d, spans=spans, tau=tau, dtype=BF16)
      for specs in (SMALL, SMALL_TILES, (SMALL_2.replace(group=32), SMALL_2))
      for gqa, d, spans, tau in ((4, 128, 1, None), (7, 80, 3, TAU))),
    Case(ODD, *SMALL, head_dim=64, spans=40, dtype=FP32, mask=True),
    # Sign and magnitude: each way along K and V, groups and whole spans, with GQA groups in turn.
    *(Case(ODD, **pair(bits, key, value, mapping), gqa=gqa, kv_heads=2, head_dim=128, tau=tau,
           dtype=BF16)
      for mapping in ("symmetric", "hybrid")
      for (bits, key, value), gqa, tau in zip(
          SIGNED_PLACES, [1, 4, 6, 7] * 4, [None, TAU, TAU] * 5, strict=False)),
    *(Case(ODD, **pair(2, key, value, mapping), spans=3, head_dim=d, mask=True, dtype=dtype)
      for mapping in ("symmetric", "hybrid")
      for key, value, d, dtype in (
          ("c32", "t32", 80, FP16), ("t32", "c32", 96, FP32), ("t64", "t64", 256, BF16),
          ("row", "c64", 64, FP32))),
    # Parameters of other types, scales beyond fp16, one mapping beside another, dense segments.
    *(Case(ODD, spec, spec, head_dim=128, spread=1e5, dtype=BF16) for spec in WIDE_SIGNED),
    Case(ODD, INNERQ_KEY, TensorSpec(2), head_dim=128, dtype=BF16, dense=(40, 0, 700, 1)),
    Case(ODD, PRESET_KEY, INNERQ_VALUE, head_dim=128, dtype=BF16, tau=TAU),
    Case((20_000,), *INNERQ, head_dim=128, dtype=BF16, spans=7, tau=TAU),
    Case(ODD, ROTATED_KEY, ROTATED_VALUE, head_dim=128, dtype=BF16, dense=(9, 0, 7, 1),
         key_norm=True),
    Case(ODD, ROTATED_KEY, ROTATED_KEY, head_dim=80, gqa=7, tau=TAU, key_norm=True),
    # A batch that needs no splits, and one sequence that needs many.
    Case((100,) * 40, PRESET_KEY, CLASSES_VALUE, kv_heads=8, head_dim=128, dtype=BF16, tau=TAU),
    Case((20_000,), PRESET_KEY, CLASSES_VALUE, head_dim=128, dtype=BF16, spans=7),
    Case((100,) * 40, kv_heads=8, head_dim=128, dtype=BF16, tau=TAU),
    Case((20_000,), head_dim=128, dtype=BF16, tau=TAU),
]  # fmt: skip


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case: Case) -> None:
    query, kv = build(case)
    kv_poisoned = poisoned(kv)
    out = decode_attention_triton(query, kv_poisoned, sm_scale=case.sm_scale, tau=case.tau)
    assert out.dtype == query.dtype
    assert_near(out, reference(case, query, kv))


@pytest.mark.parametrize(
    "specs",
    [(TensorSpec(1), TensorSpec(1)), (PRESET_KEY, TensorSpec(1)), INNERQ],
    ids=["minmax", "duotone", "innerq"],
)
def test_auto_takes_triton_on_a_gpu(specs: tuple[TensorSpec, TensorSpec]) -> None:
    case = Case((300, 20), *specs, kv_heads=2, head_dim=128, dtype=BF16)
    query, kv = build(case)
    out = decode_attention(query, kv, sm_scale=case.sm_scale)
    assert torch.equal(out, decode_attention_triton(query, kv, sm_scale=case.sm_scale))


@pytest.mark.parametrize(
    "specs",
    [(TensorSpec(1), TensorSpec(1, group=64)), CLASSES, INNERQ],
    ids=["equal", "classes", "innerq"],
)
def test_a_new_length_compiles_nothing(specs: tuple[TensorSpec, TensorSpec]) -> None:
    def compiled() -> int:
        kernels = (
            segment_kernel,
            score_range_kernel,
            merge_kernel,
            fold_kernel,
            class_order_kernel,
        )
        return sum(len(c[0]) for kernel in kernels for c in kernel.device_caches.values())

    counts = []
    for lengths in ((100, 63), (3329, 1), (1,), (16,) * 16, (2048,) * 3):
        case = Case(lengths, *specs, tau=TAU, dense=lengths)
        query, kv = build(case)
        decode_attention_triton(query, kv, sm_scale=case.sm_scale, tau=TAU)
        counts.append(compiled())
    assert len(set(counts)) == 1, counts


@pytest.mark.parametrize(
    "specs",
    [(TensorSpec(1), TensorSpec(1)), CLASSES, INNERQ, INNERQ[::-1]],
    ids=["equal", "classes", "innerq", "innerq-reversed"],
)
def test_a_captured_graph_follows_new_lengths(specs: tuple[TensorSpec, TensorSpec]) -> None:
    case = Case((300, 200), *specs, kv_heads=2, head_dim=128, tau=TAU, dense=(20, 9), dtype=BF16)
    query, kv = build(case)

    def run() -> torch.Tensor:
        return decode_attention_triton(query, kv, sm_scale=case.sm_scale, tau=TAU)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    kv[1].lengths.copy_(torch.tensor([23, 1]))
    query.copy_(torch.randn_like(query))
    graph.replay()
    assert_near(out, reference(case, query, kv))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    "specs",
    [(along(2, "t32"), along(2, "c32")), (PRESET_KEY, CLASSES_VALUE), INNERQ],
    ids=["kivi", "classes", "innerq"],
)
def test_it_never_waits_for_the_device(specs: tuple[TensorSpec, TensorSpec]) -> None:
    case = Case((300, 200), *specs, tau=TAU, dense=(20, 9), mask=True)
    query, kv = build(case)
    decode_attention_triton(query, kv, sm_scale=case.sm_scale, tau=TAU)
    with no_waits():
        out = decode_attention_triton(query, kv, sm_scale=case.sm_scale, tau=TAU)
    assert_near(out, reference(case, query, kv))
