"""Large keys by the CUDA kernels on a real GPU: stores of every scheme, models with such biases."""

import pytest
import torch
from cuda_device import NEEDS_KERNELS
from large_cases import (
    biased_model,
    decoded,
    exact,
    large_states,
    layer_spec,
    relative_error,
    steps,
)

import duotone
from duotone.attention.choice import choose
from duotone.cache.segments import PackedSegment

pytestmark = NEEDS_KERNELS
STREAMS = ["kivi", "duotone-stream", "duotone-mixed", "asymkv", "xquant"]
# Of fp16 arithmetic with levels of thousands.
FP16_ERROR = 5e-3


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", sorted(duotone.schemes()))
def test_outputs_are_those_of_the_store(name: str, static: bool) -> None:
    """CUDA kernels where the scheme has records, whatever reads it elsewhere."""
    states = large_states(0).half(), large_states(1).half()
    for query, out, segments in steps(layer_spec(name), *states, "auto", static):
        assert torch.isfinite(out).all()
        if name in STREAMS:
            assert choose(query, segments).impl == "cuda"
            packed = [x for x in segments if isinstance(x, PackedSegment) and not x.visual]
            assert all(x.records is not None for x in packed)
        assert relative_error(out, exact(query, segments)) < FP16_ERROR


@pytest.mark.parametrize("static", [False, True], ids=["growing", "static"])
@pytest.mark.parametrize("name", STREAMS)
def test_a_model_with_biased_keys_decodes(name: str, static: bool) -> None:
    model, spec = biased_model(torch.bfloat16), duotone.scheme(name)
    ours, theirs = (decoded(model, spec, impl, static) for impl in ("cuda", "reference"))
    assert torch.isfinite(ours).all()
    assert relative_error(ours, theirs.double()) < 0.1  # bf16 layers, and codes that flip by it
