"""Launches of a kept call on a real GPU: later steps, other streams, graphs."""

import pytest
import torch
from cuda_device import NEEDS_KERNELS

from duotone.attention import decode_attention
from duotone.attention.cuda import decode
from duotone.cache.segments import DenseSegment

from cases import SMALL, Case, assert_near_half, build, poisoned, reference
from paths import module_at

joint = module_at("attention/cuda/test_joint_gpu")

pytestmark = NEEDS_KERNELS
BF16 = torch.bfloat16
SHAPE = {"head_dim": 128, "kv_heads": 2, "dtype": BF16}
SHORT = {"key": SMALL[0], "value": SMALL[1]}
CASES = {
    "spans": Case((3329, 100), dense=(1, 33), **SHAPE),
    "calibrated": Case((3329, 100), dense=(1, 33), tau=(0.0, 3.0), **SHAPE),
    "groups": Case((3329, 100), **joint.KIVI, dense=(1, 33), **SHAPE),
    "norm": Case((3329, 100), **joint.KIVI, dense=(1, 33), key_norm=True, **SHAPE),
    "short spans": Case((3329, 100), **SHORT, spans=60, dense=(1, 33), **SHAPE),
}


@pytest.fixture
def plans(monkeypatch) -> list:
    """One entry for every call that chooses and prepares its launches."""
    made, plain = [], decode.attend_records

    def noted(*args, **given):
        made.append(None)
        return plain(*args, **given)

    monkeypatch.setattr(decode, "attend_records", noted)
    return made


def held(name: str, kv: list) -> list:
    """Segments as a cache holds them: short spans in canonical order."""
    return kv if name == "short spans" else joint.laid_out(kv)


def step(kv: list, new: torch.Tensor) -> list:
    """Segments with one more 16-bit token, in new tensors."""
    *packed, dense = kv
    key, value = (torch.cat([x, new.to(x)], 2) for x in (dense.key, dense.value))
    places = dense.lengths[:, None, None, None].expand_as(new)
    key, value = (x.scatter(2, places, new.to(x)) for x in (key, value))
    return [*packed, DenseSegment(key, value, dense.lengths + 1)]


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("name", CASES)
def test_later_steps_match_the_reference(name: str, plans) -> None:
    case = CASES[name]
    query, plain = build(case)
    kv = held(name, poisoned(plain))
    for _ in range(12):
        out = decode_attention(query, kv, sm_scale=case.sm_scale, tau=case.tau, impl="cuda")
        assert_near_half(out, reference(case, query, plain))
        query, new = torch.randn_like(query), torch.randn(2, 2, 1, 128, device=query.device)
        plain, kv = step(plain, new), step(kv, new)
    assert len(plans) == 1


@pytest.mark.parametrize("name", CASES)
def test_streams_take_turns(name: str, plans) -> None:
    case = CASES[name]
    query, plain = build(case)
    kv, streams = held(name, plain), [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    queries = [torch.randn_like(query) for _ in range(24)]
    found = []
    torch.cuda.synchronize()
    for number, one in enumerate(queries):
        with torch.cuda.stream(streams[number % 3]):
            given = {"sm_scale": case.sm_scale, "tau": case.tau, "impl": "cuda"}
            found.append(decode_attention(one, kv, **given))
    torch.cuda.synchronize()
    assert len(plans) == 1
    expected = [reference(case, one, plain) for one in queries]
    assert_near_half(torch.stack(found), torch.stack(expected))


@pytest.mark.parametrize("name", ["spans", "groups"])
def test_a_graph_holds_a_kept_call(name: str, plans) -> None:
    case = CASES[name]
    query, plain = build(case)
    kv = joint.laid_out(plain)
    given = {"sm_scale": case.sm_scale, "impl": "cuda"}
    for _ in range(2):
        decode_attention(query, kv, **given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode_attention(query, kv, **given)
    eager = decode_attention(torch.randn_like(query), kv, **given)
    assert len(plans) == 1
    query.copy_(torch.randn_like(query))
    graph.replay()
    torch.cuda.synchronize()
    assert_near_half(out, reference(case, query, plain))
    assert torch.isfinite(eager).all()
