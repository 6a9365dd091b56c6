"""The packing kernels' own source, run on a CPU against torch, byte for byte."""

import pytest
import torch

from duotone.attention.cuda import group_pack

from cuda_on_cpu import missing, run_on_cpu
from pack_cases import GROUP_CASES, run_groups

REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cuda_on_cpu")


@pytest.mark.parametrize("case", GROUP_CASES, ids=str)
def test_groups(case, monkeypatch, folder) -> None:
    run_on_cpu(group_pack, monkeypatch, folder)
    data, expected, overflow = run_groups(case)
    assert torch.equal(data, expected)
    assert not overflow
