"""The kernels that find levels, on a real GPU against torch."""

import pytest
import torch
from class_pack_cases import CLASS_CASES, class_states
from cuda_device import NEEDS_KERNELS
from level_cases import LEVEL_CASES, LONG_CASES, assert_same_levels, level_states, reference

from duotone.attention.cuda.classes.pack import class_pack, sorted_levels
from duotone.attention.cuda.levels.search import find_levels
from duotone.quant.checks import unchecked

pytestmark = NEEDS_KERNELS


@pytest.mark.usefixtures("poison")
@pytest.mark.parametrize("case", LEVEL_CASES + LONG_CASES, ids=str)
def test_levels(case) -> None:
    for seed in range(2):
        x, blocks = level_states(case, seed)
        assert_same_levels(case, x, find_levels(x, case.spec, blocks), reference(case, x, blocks))


@pytest.mark.parametrize("case", LONG_CASES[:2], ids=str)
def test_levels_are_the_same_every_time(case) -> None:
    x, blocks = level_states(case)
    one, other = (find_levels(x, case.spec, blocks) for _ in range(2))
    for name in ("order", "chosen_scale", "chosen_zero", "scale", "zero"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_what_no_level_can_hold_raises_as_torch_does(bad) -> None:
    x, blocks = level_states(LEVEL_CASES[2])
    x[0, 1, 77, 9] = bad
    with pytest.raises(ValueError, match=r"only finite values|must fit param_dtype"):
        sorted_levels(x, LEVEL_CASES[2].spec, blocks, 24)


def test_little_memory_is_taken() -> None:
    case = next(case for case in LONG_CASES if case.name == "groups")
    x, blocks = level_states(case)
    find_levels(x, case.spec, blocks)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    find_levels(x, case.spec, blocks)
    assert torch.cuda.max_memory_allocated() - before < x.nbytes / 2


def test_a_whole_packing_can_be_captured() -> None:
    case = CLASS_CASES[1]
    key, value, piece = class_states(case)

    def pack() -> dict[str, torch.Tensor]:
        with unchecked():
            return class_pack(key, value, case.spec, piece).records.tensors

    pack()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = pack()
    key.copy_(torch.randn_like(key))
    graph.replay()
    expected = pack()
    for name, tensor in captured.items():
        assert torch.equal(tensor, expected[name]), name
