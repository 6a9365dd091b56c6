"""Biases and swings of 1,000 and more in K and V: outputs are finite, and those of the store."""

from functools import cache
from importlib.util import find_spec

import pytest
import torch
from large_cases import (
    GQA,
    HEAD_DIM,
    KV_HEADS,
    SM_SCALE,
    STEPS,
    biased_model,
    decoded,
    exact,
    filled,
    large_states,
    layer_spec,
    relative_error,
    steps,
)
from torch import Tensor

import duotone
from duotone.attention import decode_attention
from duotone.quant import CacheSpec

SCHEMES = sorted(duotone.schemes())
# In groups along tokens or channels; with fewer bits their steps are larger.
STREAMS = [("kivi", 1), ("kivi", 2), ("duotone-stream", 2), ("duotone-mixed", 1), ("innerq", 2)]


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", SCHEMES)
def test_outputs_are_those_of_the_store(name: str, static: bool) -> None:
    states = large_states(0), large_states(1)
    seen = steps(layer_spec(name), *states, "reference", static)
    for t, (query, out, segments) in enumerate(seen):
        assert torch.isfinite(out).all()
        if t % 13 == 0 or t == STEPS - 1:
            assert relative_error(out, exact(query, segments)) < 1e-5


@pytest.mark.parametrize(("name", "bits"), STREAMS, ids=str)
def test_streams_stay_in_records(name: str, bits: int) -> None:
    spec, large = layer_spec(name, bits), (large_states(0), large_states(1))
    assert filled(spec, *large)[0].stream.records is not None
    small = [x.clone() for x in large]
    for x in small:
        x[:, :, :150] *= 1e-3  # what flushes first
    *_, (query, out, segments) = steps(spec, *small, "reference", static=True)
    assert relative_error(out, exact(query, segments)) < 1e-5


@pytest.mark.parametrize("name", SCHEMES)
def test_errors_grow_as_the_numbers_do(name: str) -> None:
    """64 times K and V give 64 times what the store holds, and 64 times its errors."""
    spec = layer_spec(name)
    states = large_states(0, 30.0, 20.0), large_states(1, 30.0, 20.0)
    (small, ledger), (large, _) = (filled(spec, *(n * x for x in states)) for n in (1, 64))
    pairs = zip(small.segments(ledger.state), large.segments(ledger.state), strict=True)
    for one, other in pairs:
        for which in ("key", "value"):
            x, y = (s.states(which)[:, :, : int(s.lengths)] for s in (one, other))
            assert torch.equal(64 * x, y)


# That InnerQ warns of such biases is of tests/hf/model/test_extreme_keys.py.
@pytest.mark.filterwarnings("ignore:K that has channels far larger")
@pytest.mark.parametrize("name", ["kivi", "duotone-stream", "innerq"])
def test_a_model_with_biased_keys_decodes_alike_in_both_caches(name: str) -> None:
    model = biased_model(torch.float64)
    spec = duotone.scheme(name)
    few = {"steps": 34}  # across a flush of the prompt's last tokens
    growing, static = (decoded(model, spec, "reference", fixed, **few) for fixed in (False, True))
    assert torch.isfinite(growing).all()
    assert relative_error(static, growing) < 1e-6


@cache
def logits_of_biased_values(spec: CacheSpec) -> Tensor:
    model = biased_model(torch.float32, "v_proj", (1000.0, 1000.0, 1000.0))
    return decoded(model, spec, "reference", steps=2)


def spreads_off(spec: CacheSpec) -> float:
    """Largest error of the logits, in their standard deviations."""
    right, ours = (logits_of_biased_values(x) for x in (duotone.scheme("dense"), spec))
    return float((ours - right).abs().max() / right.std(-1).mean())


@pytest.mark.parametrize("text", [
    "xquant", "asymkv", "kivi@1", "duotone-stream@1", "kivi@2", "kivi-sink@1", "duotone-stream@2",
    "innerq@1", "innerq@2", "duotone-mixed@1", "duotone-mixed@2",
])  # fmt: skip
def test_biased_values_cost_streams_little(text: str) -> None:
    name, _, bits = text.partition("@")
    assert spreads_off(duotone.scheme(name, **({"bits": int(bits)} if bits else {}))) < 0.01


def test_layers_that_share_codes_of_other_large_channels_are_named() -> None:
    spec = duotone.scheme("xquant", dominant=1)
    with pytest.warns(UserWarning, match=r"got layers \[0\], whose"):
        assert spreads_off(spec) > 0.1
    assert spreads_off(spec.replace(share=spec.share.replace(value=None))) < 0.01


def test_biased_values_cost_smaller_groups_more() -> None:
    spec = duotone.scheme("duotone-stream")
    value = spec.text.value.replace(group=16)
    assert spreads_off(spec.replace(text=spec.text.replace(value=value))) > 0.1


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", ["kivi", "innerq", "calibquant", "duotone"])
def test_triton_reads_them(name: str) -> None:
    states = large_states(0), large_states(1)
    spec = layer_spec(name)
    store, ledger = filled(spec, *states, laid_out=False)
    query = torch.randn(1, KV_HEADS * GQA, 1, HEAD_DIM)
    segments = store.segments(ledger.state)
    out = decode_attention(query, segments, sm_scale=SM_SCALE, impl="triton")
    assert relative_error(out, exact(query, segments)) < 1e-4
