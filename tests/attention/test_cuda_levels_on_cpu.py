"""The kernels that find levels, run on a CPU from their own source against torch."""

import pytest
from level_cases import LEVEL_CASES, assert_same_levels, level_states, reference

from duotone.attention.cuda import level_search
from duotone.attention.cuda.level_search import find_levels

from cuda_on_cpu import missing, run_on_cpu

REASON = missing()
on_cpu = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("cuda_on_cpu")


@pytest.fixture
def few_threads(monkeypatch):
    """Threads are fibers here, which take turns slowly."""
    monkeypatch.setattr(level_search, "LANES", {128: 4, 1024: 16})


@on_cpu
@pytest.mark.usefixtures("poison", "few_threads")
@pytest.mark.parametrize("case", LEVEL_CASES, ids=str)
def test_levels(case, monkeypatch, folder) -> None:
    run_on_cpu(level_search, monkeypatch, folder)
    x, blocks = level_states(case)
    assert_same_levels(case, x, find_levels(x, case.spec, blocks), reference(case, x, blocks))
