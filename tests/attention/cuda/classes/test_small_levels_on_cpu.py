"""Levels rounded to 8 bits: the kernel's own source, run on a CPU against torch."""

import pytest
import torch
from small_level_cases import SPECS, levels_of

from duotone.attention.cuda.classes import small_levels
from duotone.attention.cuda.classes.format import Classes
from duotone.attention.cuda.shared import runtime

from cuda_on_cpu import missing, run_on_cpu

ON_CPU = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.parametrize("head_dim", [64, 80])
@pytest.mark.parametrize("name", SPECS)
@ON_CPU
def test_bytes_are_those_of_torch(name: str, head_dim: int, monkeypatch, folder) -> None:
    run_on_cpu(small_levels, monkeypatch, folder)
    levels = levels_of(SPECS[name], head_dim)
    expected = levels.parameters(SPECS[name])
    for ours, theirs in zip(small_levels.small_rows(levels, SPECS[name]), expected, strict=True):
        assert torch.equal(ours, theirs)


@ON_CPU
def test_a_row_that_is_not_finite_says_so(monkeypatch, folder) -> None:
    run_on_cpu(small_levels, monkeypatch, folder)
    levels = levels_of(SPECS["plain"], 64)
    levels.scale[0, 0, 1, 5], levels.zero[0, 1, 2, 7] = float("nan"), float("inf")
    found = small_levels.small_rows(levels, SPECS["plain"])
    expected = levels.parameters(SPECS["plain"])
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours[..., 0], theirs[..., 0])
        assert ours[0, :, :, 0].eq(255).any()


@pytest.mark.usefixtures("binaries")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_the_kernel_compiles(arch: str) -> None:
    macros = small_levels.macros_of(Classes.of(SPECS["preset"], 128), 128)
    assert runtime.compiled(small_levels.SOURCE, arch, macros)[:4] == b"\x7fELF"
