"""The packing kernels' own source, run on a CPU against torch, byte for byte."""

import pytest
import torch

from duotone.attention.cuda import group_pack, span_pack
from duotone.attention.cuda.dense import TILE_TOKENS
from duotone.attention.cuda.span_held import Held

from cuda_on_cpu import missing, run_on_cpu
from pack_cases import GROUP_CASES, SPAN_CASES, assert_same_pair, run_groups, run_spans

REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cuda_on_cpu")


def spread(cases):
    """Every third case by default, the others in the slow tier."""
    return [
        pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (i % 3 > 0))
        for i, case in enumerate(cases)
    ]


@pytest.mark.parametrize("case", spread(GROUP_CASES))
def test_groups(case, monkeypatch, folder) -> None:
    run_on_cpu(group_pack, monkeypatch, folder)
    data, expected, overflow = run_groups(case)
    assert torch.equal(data, expected)
    assert not overflow


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("launches", ["once", "twice"])
@pytest.mark.parametrize("case", spread(SPAN_CASES))
def test_spans(case, launches, monkeypatch, folder) -> None:
    run_on_cpu(span_pack, monkeypatch, folder)
    # There is no cluster: a thread block holds all tiles.
    at = Held(1, -(-case.longest // TILE_TOKENS)) if launches == "once" else None
    monkeypatch.setattr(span_pack, "held", lambda *_: at)
    assert_same_pair(*run_spans(case))
