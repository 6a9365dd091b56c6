"""A repeated call gives equal bits on a real GPU, where torch is deterministic."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from cuda_device import NEEDS_KERNELS

from duotone.attention import decode_attention

from cases import Case, build
from paths import module_at

CUDA = "attention/cuda"
classes, groups, spans = (
    module_at(f"{CUDA}/{x}/test_decode_gpu") for x in ("classes", "groups", "spans")
)
joint = module_at(f"{CUDA}/test_joint_gpu")

pytestmark = NEEDS_KERNELS
TIMES = 8
CASES = [
    pytest.param(module, case, id=f"{name}-{case}-{number}")
    for name, module in (("spans", spans), ("classes", classes), ("joint", joint))
    for number, case in enumerate(module.CASES)
]


@contextmanager
def deterministic() -> Iterator[None]:
    """Ask torch for deterministic algorithms, as a caller does."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("module", "case"), CASES)
def test_calls_are_repeatable(module, case: Case) -> None:
    query, kv = build(case)
    segments = module.laid_out(kv)
    call = {"sm_scale": case.sm_scale, "tau": case.tau, "impl": "cuda"}
    with deterministic():
        first, *others = [decode_attention(query, segments, **call) for _ in range(TIMES)]
    assert torch.isfinite(first).all()
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("case", groups.CASES, ids=str)
def test_streams_are_repeatable(case: Case) -> None:
    query, kv = build(case)
    with deterministic():
        first, *others = [groups.decode(query, kv, case.sm_scale) for _ in range(TIMES)]
    for out, lse in others:
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])
