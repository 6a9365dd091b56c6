"""The kernels that find levels, run on a CPU from their own source against torch."""

from dataclasses import replace

import pytest
import torch
from level_cases import LEVEL_CASES, LevelCase, assert_same_levels, level_states, reference

from duotone.attention.cuda.classes.pack import sorted_levels
from duotone.attention.cuda.levels import gain as level_gain
from duotone.attention.cuda.levels import search as level_search
from duotone.attention.cuda.levels.search import Strip, check, find_levels
from duotone.attention.refused import reason_against
from duotone.cache import BlockTable
from duotone.quant import TensorSpec

from cuda_on_cpu import missing, run_on_cpu

REASON = missing()
on_cpu = pytest.mark.skipif(REASON is not None, reason=str(REASON))


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


@on_cpu
@pytest.mark.usefixtures("few_threads")
def test_covariances_take_turns(monkeypatch, folder) -> None:
    run_on_cpu(level_search, monkeypatch, folder)
    case = LevelCase("fit", TensorSpec(1, gain="fit"), ((0, 130, 270), (0, 1, 140)), 16)
    x, blocks = level_states(case)
    together = find_levels(x, case.spec, blocks)
    monkeypatch.setattr(level_gain, "SPREAD_BYTES", 3 * 3 * 4 * 64 * 64)
    apart = find_levels(x, case.spec, blocks)
    assert torch.equal(together.scale, apart.scale)
    assert torch.equal(together.zero, apart.zero)
    assert_same_levels(case, x, apart, reference(case, x, blocks))


@pytest.mark.parametrize("name", ["order", "chosen_zero", "scale", "zero"])
def test_wrong_levels_are_noticed(name) -> None:
    case = LEVEL_CASES[4]
    x, blocks = level_states(case)
    right = reference(case, x, blocks)
    wrong = getattr(right, name).roll(1, -1) if name == "order" else getattr(right, name) * 1.01
    assert_same_levels(case, x, right, right)
    with pytest.raises(AssertionError):
        assert_same_levels(case, x, replace(right, **{name: wrong}), right)


@pytest.mark.parametrize(
    ("longest", "head_dim", "itemsize", "strip"),
    [
        (64, 128, 2, Strip(128, 8)),
        (128, 256, 4, Strip(8, 32)),
        (300, 64, 2, Strip(64, 32)),
        (300, 128, 2, Strip(8, 32)),
        (3328, 128, 2, Strip(8, 256)),
        (8192, 128, 2, Strip(4, 256)),
        (60000, 128, 2, Strip(1, 256)),
    ],
    ids=str,
)
def test_strips_fit_shared_memory(longest, head_dim, itemsize, strip) -> None:
    assert Strip.of(longest, head_dim, itemsize) == strip


@pytest.mark.parametrize(
    ("change", "tokens", "reason"),
    [
        ({}, 111, None),
        ({"eta": 0.1}, 111, "choice of eta"),
        ({"param_dtype": "float32"}, 111, "param_dtype"),
        ({"classes": ((8, 1 / 8), (1, 1 / 2))}, 111, "codes of [1, 2, 4] bits"),
        ({}, 120_000, "does not fit shared memory"),
    ],
    ids=["all", "eta", "type", "bits", "long"],
)
def test_what_levels_cannot_be_is_named(change, tokens, reason) -> None:
    spec = TensorSpec(levels="lloyd", classes=((4, 1 / 8),)).replace(**change)
    x = torch.zeros(1, 1, 9, 64, dtype=torch.bfloat16)
    blocks = BlockTable(torch.tensor([[0, tokens]]))
    found = reason_against(check, x, spec, blocks)
    assert found is None if reason is None else reason in found
    if reason:
        with pytest.raises(ValueError, match="Use torch_levels"):
            find_levels(x, spec, blocks)
    assert "consecutive channels" in reason_against(check, x.double(), TensorSpec(), blocks)


def test_layers_share_the_blocks_of_a_table() -> None:
    x, spans = torch.randn(1, 1, 200, 8), BlockTable(torch.tensor([[0, 200]]))
    groups, whole = TensorSpec(group=64), TensorSpec()
    first, values, second = (sorted_levels(x, spec, spans, 8) for spec in (groups, whole, groups))
    assert first.blocks is second.blocks
    assert values.blocks is spans
