"""A call over the packed objects of the last call makes its launches again, for other tensors."""

import copy
import ctypes
import gc
import threading
import weakref
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from launch_cases import LENGTHS, records_of
from transformers import LlamaConfig, LlamaForCausalLM

import duotone
from duotone.attention import decode_attention
from duotone.attention.cuda import decode, kept_call
from duotone.attention.cuda.classes.layout import class_layout
from duotone.attention.cuda.groups.records import GroupLayout
from duotone.attention.cuda.shared import launch
from duotone.attention.cuda.spans.layout import span_layout
from duotone.cache.segments import DenseSegment
from duotone.quant import TensorSpec
from pretended_gpu import pretend

from cases import CALIBRATED, Case

KIVI = {"key": TensorSpec(2, "tokens", 32), "value": TensorSpec(1, "channels", 32)}
ROTATED = TensorSpec(2, transform="hadamard")
SHAPE = {"head_dim": 128, "kv_heads": 2, "dense": (9, 700), "dtype": torch.bfloat16}
KINDS = {
    "spans": (Case(LENGTHS, **SHAPE), span_layout, None),
    "calibrated": (Case(LENGTHS, **SHAPE), span_layout, (0.0, 3.0)),
    "classes": (Case((900, 300), *CALIBRATED, **SHAPE), class_layout, None),
    "groups": (Case(LENGTHS, **KIVI, **SHAPE), GroupLayout(), None),
    "keys in a basis": (Case(LENGTHS, ROTATED, TensorSpec(2), **SHAPE), span_layout, None),
    "values in a basis": (Case(LENGTHS, TensorSpec(2), ROTATED, **SHAPE), span_layout, None),
}
SHORT = Case((300, 90), **SHAPE)
# Addresses of what a call allocates for itself.
OWN = ("partial", "weights", "counters", "out", "ranges")


@pytest.fixture
def plans(caught, monkeypatch) -> list:
    """One entry for every call that chooses and prepares its launches."""
    pretend(monkeypatch)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(launch, "stream_handle", lambda index: 7)
    made, plain = [], decode.attend_records

    def noted(*args, **given):
        made.append(args)
        return plain(*args, **given)

    monkeypatch.setattr(decode, "attend_records", noted)
    return made


def attend(query, kv, tau=None, sm_scale=0.1) -> torch.Tensor:
    return decode_attention(query, kv, sm_scale=sm_scale, tau=tau, impl="cuda")


def fields(given: ctypes.Structure) -> dict:
    kinds = [one for kind in type(given).__mro__ for one in getattr(kind, "_fields_", ())]
    plain = {name: getattr(given, name) for name, *_ in kinds}
    return {n: bytes(x) if isinstance(x, ctypes.Structure) else x for n, x in plain.items()}


def decodes(launches) -> list:
    """Launches without those that rotate queries, into tensors that differ from call to call."""
    return [one for one in launches if one.source != "rotate/queries.cu"]


def next_step(query, kv):
    """Another query and one more 16-bit token in other tensors, and the packed segments."""
    *packed, dense = kv
    key, value = (torch.cat([x, x[:, :, :1]], 2) for x in (dense.key, dense.value))
    return query + 1, [*packed, DenseSegment(key, value, dense.lengths + 1)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_call_makes_the_launches_that_a_new_one_makes(kind, caught, plans) -> None:
    case, layout, tau = KINDS[kind]
    query, kv = records_of(case, layout)
    attend(query, kv, tau)
    query, kv = next_step(query, kv)
    caught.clear()
    attend(query, kv, tau)
    assert len(plans) == 1
    kept = decodes(caught)
    kept_call._kept().clear()
    caught.clear()
    attend(query, kv, tau)
    assert len(plans) == 2
    new = decodes(caught)
    assert [(x.source, x.macros, x.at) for x in kept] == [(x.source, x.macros, x.at) for x in new]
    for one, other in zip(kept, new, strict=True):
        ours, theirs = fields(one.given), fields(other.given)
        moving = {*OWN} if one.given.query == query.data_ptr() else {*OWN, "query"}
        assert {n for n in ours if ours[n] != theirs[n]} <= moving
        assert all(bool(ours[n]) == bool(theirs[n]) for n in ours)


def test_a_kept_call_writes_to_a_result_and_to_room_of_its_own(caught, plans) -> None:
    query, kv = records_of(KINDS["calibrated"][0])
    attend(query, kv, (0.0, 3.0))
    caught.clear()
    out, other = attend(query, kv, (0.0, 3.0)), attend(query, kv, (0.0, 3.0))
    assert len(plans) == 1
    assert [one.given.out for one in caught] == [x.data_ptr() for x in (out, out, other, other)]
    span, dense, *_ = caught
    assert (span.given.partial, span.given.weights) == (dense.given.partial, dense.given.weights)
    rows = query.shape[0] * query.shape[1] * span.given.all_parts
    assert span.given.weights == span.given.partial + 4 * 128 * rows
    assert span.given.ranges == span.given.weights + 8 * rows


CHANGES = {
    "records": lambda q, kv: (q, [replace(kv[0], records=copy.copy(kv[0].records)), kv[1]]),
    "scales": lambda q, kv: (q, [replace(kv[0], key=copy.copy(kv[0].key)), kv[1]]),
    "text": lambda q, kv: (q, [replace(kv[0], visual=not kv[0].visual), kv[1]]),
    "norm": lambda q, kv: (q, [replace(kv[0], key_norm=torch.ones(2, 2, 128)), kv[1]]),
    "order": lambda q, kv: (q, kv[::-1]),
    "fewer": lambda q, kv: (q, kv[:1]),
    "more": lambda q, kv: (q, [*kv, kv[1]]),
    "dtype": lambda q, kv: (q.half(), kv),
    "heads": lambda q, kv: (torch.cat([q, q], 1), kv),
    "more 16-bit tokens": lambda q, kv: (q, [kv[0], longer(kv[1], 16)]),
    "scale": lambda q, kv: (q, kv, None, 0.2),
    "calibration": lambda q, kv: (q, kv, (0.0, 1.0)),
    "16-bit type": lambda q, kv: (q, [kv[0], replace(kv[1], key=kv[1].key.half(),
                                                     value=kv[1].value.half())]),
}  # fmt: skip


def longer(dense: DenseSegment, tokens: int) -> DenseSegment:
    key, value = (torch.cat([x, x[:, :, :tokens]], 2) for x in (dense.key, dense.value))
    return replace(dense, key=key, value=value)


@pytest.mark.parametrize("change", CHANGES)
def test_another_kind_of_call_is_planned_anew(change, plans) -> None:
    query, kv = records_of(SHORT)
    attend(query, kv)
    attend(query, kv)
    assert len(plans) == 1
    attend(*CHANGES[change](query, kv))
    assert len(plans) == 2


def test_deterministic_algorithms_are_planned_anew(plans) -> None:
    query, kv = records_of(SHORT)
    attend(query, kv)
    torch.use_deterministic_algorithms(True)
    try:
        attend(query, kv)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(plans) == 2


def test_a_wrong_call_is_refused_as_a_first_one(plans) -> None:
    query, kv = records_of(SHORT)
    attend(query, kv)
    mask = torch.ones(2, 1, kv[0].tokens, dtype=torch.bool)
    with pytest.raises(ValueError, match="take no mask"):
        attend(query, [replace(kv[0], mask=mask), kv[1]])
    with pytest.raises(ValueError, match="query must be"):
        attend(query[0], kv)
    with pytest.raises(ValueError, match="impl must be one of"):
        decode_attention(query, kv, sm_scale=0.1, impl="other")
    apart = query.new_empty(query.numel() + 1)[1:].view(query.shape).copy_(query)
    with pytest.raises(ValueError, match="must be aligned"):
        attend(apart, kv)


def unaligned(dense: DenseSegment) -> DenseSegment:
    room = dense.key.new_zeros(dense.key.numel() + 4)
    return replace(dense, key=room[4:].view(dense.key.shape))


UNREADABLE = {
    "unaligned": unaligned,
    "apart": lambda x: replace(x, value=torch.cat([x.value, x.value], 3)[..., :128]),
    "masked": lambda x: replace(x, mask=torch.ones(2, 1, x.tokens, dtype=torch.bool)),
}


@pytest.mark.parametrize("change", UNREADABLE)
def test_16_bit_tokens_that_no_kernel_reads_are_left_to_triton(change, plans, monkeypatch) -> None:
    query, kv = records_of(SHORT)
    attend(query, kv)
    left = []
    monkeypatch.setattr(
        decode, "_attend_with_triton", lambda query, read, others, *rest: left.extend(others)
    )
    dense = UNREADABLE[change](kv[1])
    attend(query, [kv[0], dense])
    assert left == [dense]
    assert len(plans) == 2


def test_other_implementations_are_not_kept_launches(caught, plans) -> None:
    query, kv = records_of(SHORT)
    attend(query, kv)
    caught.clear()
    decode_attention(query, kv, sm_scale=0.1, impl="reference")
    assert not caught


def test_all_launches_go_to_the_device_of_the_query(caught, plans, monkeypatch) -> None:
    case, layout, _ = KINDS["keys in a basis"]
    query, kv = records_of(case, layout)
    attend(query, kv)
    caught.clear()

    @contextmanager
    def device(of):
        caught.append("begin")
        yield
        caught.append("end")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device", device)
    attend(query, kv)
    assert len(plans) == 1
    assert [getattr(one, "source", one) for one in caught] == [
        "begin", "rotate/queries.cu", "spans/decode.cu", "dense/decode.cu", "end",
    ]  # fmt: skip


def test_all_launches_go_to_the_current_stream(plans, monkeypatch) -> None:
    query, kv = records_of(SHORT)
    attend(query, kv)
    monkeypatch.setattr(launch, "stream_handle", lambda index: 9)
    attend(query, kv)
    assert len(plans) == 1
    made = kept_call._kept()[id(kv[0].records)][1].launched.made
    assert [one.settings.hStream for one in made] == [9, 9]


def test_each_thread_keeps_its_own(plans) -> None:
    query, kv = records_of(SHORT)
    attend(query, kv)
    thread = threading.Thread(target=attend, args=(query, kv))
    thread.start()
    thread.join()
    assert len(plans) == 2


def test_kept_launches_keep_no_tensor_alive(plans) -> None:
    query, kv = records_of(SHORT)
    attend(query, kv)
    before = len(kept_call._kept())
    held = [weakref.ref(x) for x in (kv[0].records, kv[0].key, kv[1].key, kv[1].lengths, query)]
    plans.clear()
    gc.disable()
    try:
        del query, kv
        assert not any(reference() is not None for reference in held)
    finally:
        gc.enable()
    assert len(kept_call._kept()) == before - 1


def plans_of_steps(name: str, plans: list) -> list[int]:
    """Plans of each of 40 steps of a model of two layers inside a growing cache."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).to(torch.bfloat16).eval()
    spec, found = duotone.scheme(name), []
    with torch.no_grad(), duotone.enable(model, spec, graphs=False):
        cache = duotone.QuantizedCache(model, spec)
        model(torch.randint(0, 64, (1, 300)), past_key_values=cache)
        for _ in range(40):
            plans.clear()
            model(torch.randint(0, 64, (1, 1)), past_key_values=cache)
            found.append(len(plans))
    return found


@pytest.mark.parametrize("name", ["kivi", "innerq", "xquant"])
def test_layers_of_a_growing_cache_plan_few_of_their_steps(name: str, plans) -> None:
    found = plans_of_steps(name, plans)
    # The first step, then 16 more tokens of 16 bit or a group that has left: for both layers.
    assert found[0] == 2
    assert sum(found[1:]) <= 2 * 2 * -(-39 // 16)
    assert set(found) == {0, 2}
