"""The CUDA kernels on a real GPU: all widths and shapes, calibration, graphs, whole models."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from cuda_calls import (
    assert_every_impl_is_near,
    assert_near_the_reference,
    assert_replays_take_new_queries,
)
from cuda_device import NEEDS_KERNELS

import duotone
from duotone.attention import decode_attention
from duotone.attention.cuda.shared.geometry import Geometry
from duotone.attention.cuda.spans import decode as span_decode
from duotone.attention.cuda.spans.layout import WIDTHS
from duotone.inference.batch import encode, generate, make_cache, prepare
from duotone.loading import load
from duotone.quant import TensorSpec
from duotone.tasks import TASKS

from basis_cases import laid_out
from cases import Case, assert_near_half, build, reference

pytestmark = NEEDS_KERNELS
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ODD = (3329, 100, 63, 1)
TAU = (0.0, 3.0)


def whole(bits: int, **fields) -> dict[str, TensorSpec]:
    spec = TensorSpec(bits, **fields)
    return {"key": spec, "value": spec}


CASES = [
    *(Case(ODD, **whole(bits), kv_heads=2, head_dim=128, tau=tau, dtype=BF16)
      for bits, tau in product(WIDTHS, (None, TAU))),
    *(Case(ODD, gqa=gqa, kv_heads=2, head_dim=128, dtype=BF16) for gqa in (1, 2, 5, 6, 7, 12, 16)),
    *(Case(ODD, gqa=gqa, kv_heads=2, head_dim=128, tau=TAU, dtype=FP16) for gqa in (1, 7, 16)),
    *(Case(ODD, **whole(bits), head_dim=d, dtype=FP16, tau=tau)
      for (bits, d), tau in zip(
          product((1, 2, 3, 4), (64, 80, 96, 256)), [None, TAU] * 8, strict=True)),
    Case(ODD, TensorSpec(1), TensorSpec(4), head_dim=128, dtype=BF16),
    Case(ODD, TensorSpec(8), TensorSpec(2), head_dim=128, dtype=FP16, tau=TAU),
    Case(ODD, TensorSpec(3), TensorSpec(1), gqa=7, head_dim=128, dtype=BF16, tau=TAU),
    Case(ODD, TensorSpec(4), TensorSpec(3), gqa=16, head_dim=128, dtype=BF16),
    Case(ODD, **whole(1, levels="lloyd"), head_dim=128, dtype=FP32),
    *(Case(ODD, **whole(bits, param_dtype="float8"), gqa=gqa, head_dim=d, spans=spans, tau=tau,
           dtype=BF16)
      for bits, gqa, d, spans, tau in (
          (4, 4, 128, 1, None), (1, 7, 80, 3, None), (2, 6, 96, 1, TAU), (3, 12, 64, 1, None))),
    Case(ODD, **whole(2, param_dtype="float8"), head_dim=256, dtype=FP32),
    Case(ODD, **whole(2), head_dim=64, dtype=FP32, tau=TAU),
    # Ranges of their own for runs of tokens, empty ones among them.
    Case((3329, 700), **whole(1), spans=13, head_dim=128, dtype=BF16),
    Case((3329, 700), **whole(2, group=128), spans=2, head_dim=128, dtype=BF16),
    Case((900, 300), **whole(1), spans=3, head_dim=128, dtype=BF16, tau=TAU),
    # Dense segments beside, keys behind their norm.
    Case(ODD, **whole(1), kv_heads=2, head_dim=128, dense=(40, 0, 700, 1), dtype=BF16, tau=TAU),
    Case(ODD, **whole(2), kv_heads=2, head_dim=128, dense=(40, 9, 700, 1), dtype=FP16),
    Case(ODD, **whole(1), head_dim=128, dtype=BF16, key_norm=True),
    Case(ODD, TensorSpec(1, transform="hadamard"), TensorSpec(1), head_dim=128, dtype=FP16),
    # No splits and many; scores of a large spread.
    Case((100,) * 40, kv_heads=8, head_dim=128, dtype=BF16, tau=TAU),
    Case((3328,) * 40, kv_heads=8, head_dim=128, dtype=BF16),
    # As many units as places of 132 multiprocessors with four blocks each, one more, many more.
    *(Case((100,) * n, head_dim=128, dtype=BF16) for n in (528, 529)),
    Case((300, 1, 128, 0, 97) * 30, kv_heads=8, head_dim=128, dtype=BF16, dense=(9,) * 150),
    Case((300, 128) * 50, kv_heads=8, head_dim=128, dtype=BF16),
    Case((20_000,), head_dim=128, dtype=BF16, tau=TAU),
    # Parts of a kv head that are a cluster, some of them without keys.
    Case((6000, 3000, 5, 1, 700, 64, 128, 5999), kv_heads=8, head_dim=128, dtype=BF16, tau=TAU),
    Case((70_000, 3), head_dim=128, dtype=BF16, kv_heads=1),
]  # fmt: skip


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case: Case) -> None:
    assert_near_the_reference(case, laid_out)


@pytest.mark.parametrize("long", [True, False], ids=["long", "short"])
@pytest.mark.parametrize("lengths", [(3328, 1, 130) * 20, (9000, 300, 0)], ids=["whole", "splits"])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_launches_may_be_long_or_short(bits, lengths, long, monkeypatch) -> None:
    monkeypatch.setattr(span_decode, "LONG_RECORDS", 0 if long else 1 << 30)
    span_decode.geometry.cache_clear()
    case = Case(lengths, **whole(bits), kv_heads=8, head_dim=128, dtype=BF16)
    assert_near_the_reference(case, laid_out)
    span_decode.geometry.cache_clear()


@pytest.mark.parametrize("at", [Geometry(8, 2, 1, 2), Geometry(4, 4, 3, 4), Geometry(8, 2, 2, 2)])
@pytest.mark.parametrize("gqa", [1, 4, 7])
@pytest.mark.parametrize("bits", [1, 2, 3])
def test_kv_heads_may_be_sub_blocks_of_one_block(bits, gqa, at, monkeypatch) -> None:
    monkeypatch.setattr(span_decode, "geometry", lambda *_: at)
    case = Case((9000, 0, 1, 300, 3328), **whole(bits), gqa=gqa, kv_heads=4, head_dim=64)
    assert_near_the_reference(case, laid_out)


def test_peaky_scores_keep_their_low_digits() -> None:
    case = Case((5000, 300), kv_heads=2, head_dim=128, dtype=FP16)
    assert_near_the_reference(case, laid_out, query_scale=6)


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "read-twice"])
@pytest.mark.parametrize(("lengths", "spans"), [((5000, 300), 1), ((900, 300), 3)], ids=str)
@pytest.mark.parametrize(("strength", "bits"), [(6, 1), (0.01, 1), (3, 2), (3, 3), (3, 4)])
def test_calibrated_scores_may_be_kept_or_made_twice(
    strength, bits, lengths, spans, keeps, monkeypatch
) -> None:
    case = Case(lengths, **whole(bits), spans=spans, head_dim=128, tau=TAU, dtype=FP16)
    if not keeps:
        monkeypatch.setattr(span_decode, "kept_geometry", lambda *_: None)
    assert_near_the_reference(case, laid_out, query_scale=strength)


def test_wrong_codes_are_noticed() -> None:
    case = Case((300,), head_dim=128, dtype=BF16)
    query, kv = build(case)
    segment = laid_out(kv)[0]
    flipped = replace(segment.records, data=segment.records.data ^ 0x10)
    out = decode_attention(
        query, [replace(segment, records=flipped)], sm_scale=case.sm_scale, impl="cuda"
    )
    with pytest.raises(AssertionError, match="rms"):
        assert_near_half(out, reference(case, query, kv))


def test_auto_takes_cuda_and_the_others_still_can() -> None:
    case = Case((100, 700), kv_heads=2, head_dim=128, dense=(5, 9), dtype=BF16)
    assert_every_impl_is_near(case, laid_out)


@pytest.mark.parametrize("tau", [None, TAU], ids=["plain", "tau"])
@pytest.mark.parametrize("dense", [None, (40, 7)], ids=["alone", "dense"])
def test_runs_in_a_graph_and_follows_new_lengths(dense, tau) -> None:
    case = Case((3000, 900), kv_heads=2, head_dim=128, dense=dense, tau=tau, dtype=BF16)
    assert_replays_take_new_queries(case, laid_out)


@pytest.fixture(scope="module")
def pictures():
    """The embedded model in float32, and questions about pictures as tensors."""
    loaded = load(None, "cuda", torch.float32)
    examples = [TASKS["documents"].example(i, "calibration").messages() for i in range(6)]
    return loaded.model, encode(loaded.processor, examples)


@pytest.mark.parametrize("bits", [1, 2, 3])
@pytest.mark.parametrize("name", ["calibquant", "minmax"])
def test_a_model_writes_what_it_writes_by_the_reference(pictures, name: str, bits: int) -> None:
    model, inputs = pictures
    batch = prepare(model, inputs)
    spec = duotone.scheme(name, bits=bits).replace(ranges="run")
    answers = {}
    for impl in ("reference", "auto"):
        cache = make_cache(model, spec, batch, impl)
        answers[impl] = generate(model, batch, cache, 12).token_ids
        pairs = [layer.store.visual for layer in cache.layers]
        assert all((pair.records is not None) == (impl == "auto") for pair in pairs)
    assert answers["reference"] == answers["auto"]


@pytest.mark.parametrize("bits", [2, 3])
def test_a_cache_in_records_does_what_caches_do(pictures, bits: int, tmp_path) -> None:
    model, inputs = pictures
    batch = prepare(model, inputs)
    spec = duotone.scheme("minmax", bits=bits)
    laid, plain = (make_cache(model, spec, batch, impl) for impl in ("auto", "reference"))
    for cache in (laid, plain):
        generate(model, batch, cache, 4)
        cache.batch_select_indices(torch.tensor([4, 1]))
        cache.crop(-2)
    laid.save(tmp_path / "cache.safetensors")
    loaded = duotone.QuantizedCache.load(tmp_path / "cache.safetensors", model)
    for ours, theirs, back in zip(laid.layers, plain.layers, loaded.layers, strict=True):
        for which in ("key", "value"):
            expected = getattr(theirs.store.visual, which).dequantize()
            for store in (ours.store, back.store):
                got = getattr(store.visual.canonical(), which).dequantize()
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    assert laid.memory().params_bytes == plain.memory().params_bytes
    filled = -(-256 // 64) * 64 / 256
    assert (
        plain.memory().codes_bytes
        <= laid.memory().codes_bytes
        <= 1.1 * filled * (plain.memory().codes_bytes)
    )


def test_a_spec_without_kernels_raises_before_the_model_runs(pictures) -> None:
    model, _ = pictures
    spec = duotone.scheme("kivi").replace(
        text=duotone.KVSpec(*2 * [duotone.TensorSpec(3, group=32)])
    )
    with pytest.raises(ValueError, match="impl='cuda' is not possible"):
        duotone.QuantizedCache(model, spec, impl="cuda")
