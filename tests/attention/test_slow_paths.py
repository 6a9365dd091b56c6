"""A call that leaves the CUDA kernels says why, once per cache and cause; on a CPU it does not."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from begun import begin
from launch_cases import records_of

import duotone
from duotone import KVSpec, TensorSpec
from duotone.attention import choice, decode_attention
from duotone.attention.cuda import decode
from duotone.attention.cuda.classes.layout import class_layout
from duotone.attention.cuda.shared import runtime
from duotone.attention.cuda.shared.of_records import CALIBRATED as CALIBRATED_SCORES
from duotone.attention.static import StaticDecoder
from duotone.attention.triton import family as triton_family
from duotone.cache.segments import DenseSegment
from duotone.tools.slow_paths import SlowPaths, SlowPathWarning
from pretended_gpu import pretend

from cases import CALIBRATED, Case, build
from frozen_decoder import Heads, Tokens, frozen_decoder

SHAPE = Heads(3, 4, 2, 64)
BATCH, STEPS = 2, 6


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H200 with Triton."""
    pretend(monkeypatch)


def said(query, kv, slow: SlowPaths | None = None, **given) -> list[str]:
    """The warnings of one call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        slow = slow or SlowPaths()
        decode_attention(query, kv, sm_scale=0.1, slow=slow, **given)
    assert all(w.category is SlowPathWarning for w in caught)
    return [str(w.message) for w in caught]


PLAIN = Case((300, 90), head_dim=64, dense=(9, 5))
# Each breaks one rule.
ODD_GROUPS = TensorSpec(2, group=16)
CAUSES = {
    "spec": (build(replace(PLAIN, key=ODD_GROUPS, value=ODD_GROUPS)), {}, "groups of 96 tokens"),
    "shape": (records_of(replace(PLAIN, gqa=17)), {}, "no CUDA kernel has this shape"),
    "type": (records_of(replace(PLAIN, dtype=torch.float64)), {}, "query must be one of"),
    "mask": (build(replace(PLAIN, mask=True)), {}, "take no mask"),
    "order": (build(PLAIN), {}, "its codes have no records"),
    "calibrated classes": (
        records_of(replace(PLAIN, key=CALIBRATED[0], value=CALIBRATED[1]), class_layout),
        {"tau": (0.0, 1.0)},
        CALIBRATED_SCORES,
    ),
}


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_named_with_its_cost(cause: str) -> None:
    (query, kv), given, rule = CAUSES[cause]
    (message,) = said(query, kv, **given)
    assert message.startswith("decode attention runs by Triton, 5 to 20 times slower")
    assert rule in message.partition("because")[2]


@pytest.mark.usefixtures("gpu")
def test_the_device_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    query, kv = build(PLAIN)
    monkeypatch.setattr(runtime, "is_untried", lambda device: True)
    assert runtime.UNTRIED in said(query, kv)[0]
    old = "CUDA kernels need compute capability 8.0"
    monkeypatch.setattr(runtime, "missing", lambda device: old)
    assert old in said(query, kv)[0]


@pytest.mark.usefixtures("gpu")
def test_the_reference_is_named_where_there_is_no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "first_refusal", triton_family.first_refusal)
    monkeypatch.setattr(triton_family, "find_spec", lambda name: None)
    (message,) = said(*build(PLAIN))
    assert "PyTorch operations, slower than attention on a 16-bit copy" in message
    assert "Triton, which is not installed" in message


@pytest.mark.usefixtures("gpu")
def test_many_dense_tokens_alone_are_named_and_few_are_not() -> None:
    query, _ = build(PLAIN)
    for tokens, warned in ((choice.FEW_TOKENS, 0), (choice.FEW_TOKENS + 1, 1)):
        states = torch.zeros(2, 1, tokens, 64, dtype=torch.bfloat16)
        lengths = torch.full((2,), tokens)
        messages = said(query.bfloat16(), [DenseSegment(states, states, lengths)])
        assert len(messages) == warned
        assert all("no token of this cache is packed" in m for m in messages)


@pytest.mark.usefixtures("gpu")
def test_segments_among_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "_attend_with_triton", lambda query, *rest: query)
    monkeypatch.setattr(decode.torch.cuda, "device", lambda device: warnings.catch_warnings())
    query, (packed, dense) = records_of(PLAIN)
    wide = replace(dense, key=dense.key.float(), value=dense.value.float())
    (message,) = said(query, [packed, wide])
    assert message.startswith("decode attention of some tokens runs by Triton")
    assert "16-bit type" in message
    assert said(query, [packed, wide], impl="cuda") == [message]


def test_a_cpu_is_told_nothing() -> None:
    for (query, kv), given, _ in CAUSES.values():
        assert not said(query, kv, **given)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_who_asks_for_an_implementation_is_told_nothing(impl: str) -> None:
    assert not said(*build(PLAIN), impl=impl)


def decoder(slow: SlowPaths) -> StaticDecoder:
    """Three layers whose streams break one rule by numbers of their own."""
    own = (
        duotone.LayerRule(
            i, i + 1, text=KVSpec(TensorSpec(2, group=8), TensorSpec(2, "channels", 8 * (i + 1)))
        )
        for i in range(3)
    )
    spec = duotone.scheme("kivi", bits=2).replace(recent=16, layers=tuple(own))
    at = frozen_decoder(SHAPE, spec, Tokens(0, 60, STEPS), BATCH, impl="reference")
    at.impl, at.slow = "auto", slow
    return at


def steps(at: StaticDecoder) -> list[str]:
    query = torch.randn(BATCH, SHAPE.q_heads, 1, SHAPE.head_dim)
    states = torch.randn(2, BATCH, SHAPE.kv_heads, 1, SHAPE.head_dim)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STEPS // 2):
            begin(at)
            for layer in range(SHAPE.layers):
                at.attend(layer, query, *states, 0.3)
    return [str(w.message) for w in caught]


@pytest.mark.usefixtures("gpu")
def test_a_cause_is_said_once_for_all_layers_and_steps() -> None:
    slow = SlowPaths()
    at = decoder(slow)
    (message,) = steps(at)
    assert "group records need groups of 32, 64 or 128" in message
    assert not steps(at)  # nor later
    other = build(replace(PLAIN, key=ODD_GROUPS, value=ODD_GROUPS))
    assert len(said(*other, slow)) == 1  # another cause
    assert len(steps(decoder(SlowPaths()))) == 1  # another cache


def test_a_copy_has_heard_what_its_original_has() -> None:
    slow = SlowPaths()
    with pytest.warns(SlowPathWarning, match="x runs by Triton, .* because y; 3"):
        slow.say("x", "triton", "y; 3")
    copy.deepcopy(slow).say("x", "triton", "y; 4")
    with pytest.warns(SlowPathWarning):
        slow.say("x", "reference", "y; 3")
