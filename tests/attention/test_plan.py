"""A plan of a layer, made before a cache exists, is what the segments of the cache get."""

from itertools import product

import pytest
import torch

import duotone
from duotone import CacheSpec, KVSpec, Sharing, TensorSpec
from duotone.attention import Shape, resolve, resolve_layers
from duotone.attention.choice import choose
from duotone.attention.cuda.shared import runtime
from duotone.attention.plan import DENSE, NOTHING_PACKED, SLIDING, alike
from pretended_gpu import pretend

from frozen_decoder import Heads, Tokens, frozen_decoder

GROUPS = KVSpec(TensorSpec(2, group=32), TensorSpec(2, "channels", 32))
STREAM = duotone.scheme("kivi", bits=2).replace(recent=16, sink=0)
WIDE_GROUPS = KVSpec(TensorSpec(2, group=32), TensorSpec(2, "channels", 64))
TURNED = GROUPS.replace(value=TensorSpec(2, "channels", 32, transform="hadamard"))
SPECS = {
    "kivi": STREAM,
    "groups of 64 channels": STREAM.replace(text=WIDE_GROUPS),
    "groups of 8": STREAM.replace(
        text=KVSpec(TensorSpec(2, group=8), TensorSpec(2, "channels", 8))
    ),
    "turned values": STREAM.replace(text=TURNED),
    "innerq": duotone.scheme("innerq").replace(sink=4, recent=16),
    "shared": STREAM.replace(share=Sharing(key=1, value=0, layers=2, dominant=1)),
    "1 bit": duotone.scheme("minmax", bits=1),
    "calibrated": duotone.scheme("calibquant"),
    "unequal channels": duotone.scheme("duotone-whole", bits=1),
    "calibrated, unequal channels": duotone.scheme("duotone-whole", bits=1).replace(tau=(0.0, 1.0)),
    "with a background": duotone.scheme("duotone", bits=1),
    "mixed": duotone.scheme("duotone-mixed", bits=1),
    "3 bit": duotone.scheme("duotone-whole", bits=3),
    "8 bit": duotone.scheme("minmax", bits=8),
}
# (head_dim, q heads, kv heads, type)
SHAPES = {
    "64": Shape(64, 4, 2, torch.bfloat16),
    "72": Shape(72, 4, 2, torch.bfloat16),
    "17 q heads": Shape(64, 34, 2, torch.bfloat16),
    "fp32": Shape(64, 4, 2, torch.float32),
    "320": Shape(320, 4, 2, torch.float16),
}
NAMES = {"visual": "visual", "background": "background", "stream": "text"}
CASES = list(product(SPECS, SHAPES))


def segments(spec: CacheSpec, shape: tuple, layer: int) -> dict[str, object]:
    head_dim, q_heads, kv_heads, dtype = shape
    heads = Heads(3, q_heads, kv_heads, head_dim)
    tokens = Tokens(0 if spec.visual == "text" else 800, 150, 8)
    store = frozen_decoder(heads, spec, tokens, 1, dtype=dtype).stores[layer]
    names = [NAMES[name] for name in NAMES if getattr(store, name) is not None]
    return dict(zip([*names, DENSE], store.segments, strict=True))


@pytest.mark.parametrize(("name", "shape"), CASES, ids=["-".join(case) for case in CASES])
def test_explains_what_a_cache_gets(name: str, shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)
    spec, at = SPECS[name], SHAPES[shape]
    if shape in ("72", "320") and _does_not_fit(spec, at[0]):
        pytest.skip("groups do not divide the channels")
    for layers, plan in alike(resolve_layers(spec, (False,) * 3, at)):
        found = segments(spec, at, layers[0])
        query = torch.zeros(1, at.q_heads, 1, at.head_dim, dtype=at.dtype)
        read = {id(segment) for _, segment in choose(query, [*found.values()], spec.tau).read}
        for kind, segment in found.items():
            assert (plan.reasons[kind] is None) == (id(segment) in read), plan.reasons[kind]
            assert (plan.readers[kind].impl == "cuda") == (id(segment) in read)


def _does_not_fit(spec: CacheSpec, head_dim: int) -> bool:
    policies = [x for x in (spec.visual, spec.text, spec.background) if isinstance(x, KVSpec)]
    tensors = [t for kv in policies for t in (kv.key, kv.value)]
    return any(t.along == "channels" and t.group and head_dim % t.group for t in tensors)


def test_a_device_and_a_window_are_reasons_for_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = SHAPES["64"]
    everything = {"visual", "background", "text", DENSE}
    assert resolve(SPECS["mixed"], shape).reasons == dict.fromkeys(everything)
    slides = resolve(SPECS["mixed"], shape, sliding=True).reasons
    assert slides == dict.fromkeys(everything, SLIDING)
    cpu = resolve(SPECS["mixed"], shape, torch.device("cpu")).reasons
    assert "CUDA device" in cpu["text"]
    monkeypatch.setattr(runtime, "missing", lambda device: None)
    at = (SPECS["mixed"], shape, torch.device("cpu"))
    assert set(resolve(*at).reasons.values()) == {runtime.UNTRIED}
    assert resolve(*at, impl="cuda").reasons == dict.fromkeys(everything)
    assert "impl='triton'" in resolve(*at, impl="triton").reasons["text"]


def test_layers_with_one_answer_are_together() -> None:
    sliding = (True, False, True, False)
    found = alike(resolve_layers(SPECS["kivi"], sliding, SHAPES["64"]))
    assert [layers for layers, _ in found] == [[0, 2], [1, 3]]
    dense = resolve(duotone.scheme("dense"), SHAPES["64"])
    assert dense.reasons == {DENSE: NOTHING_PACKED}


def test_averaged_codes_are_explained() -> None:
    spec = SPECS["kivi"].replace(share=Sharing(key=0, value=0, layers=2, weights=(0.5, 0.5)))
    ((_, plan),) = alike(resolve_layers(spec, (False,) * 4, SHAPES["64"]))
    assert "averaged" in plan.reasons["text"]


def test_readers_are_named_where_no_kernel_reads_the_tokens() -> None:
    three = STREAM.replace(text=KVSpec(TensorSpec(3, group=32), TensorSpec(3, "channels", 32)))
    for spec, impl in ((three, "reference"), (SPECS["groups of 8"], "triton")):
        plan = resolve(spec, SHAPES["64"])
        assert plan.readers["text"].impl == impl
        assert plan.layouts.stream is None
    assert resolve(SPECS["kivi"], SHAPES["64"]).layouts.stream is not None
