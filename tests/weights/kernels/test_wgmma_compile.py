"""The source of warpgroup products compiles for sm_90a without a GPU, where NVRTC is installed."""

from pathlib import Path

import pytest

from cubins import stack_of
from duotone.tools.nvrtc import Sources
from duotone.weights.kernels.cuda import unpack_int4, wgmma_gemm
from duotone.weights.kernels.cuda.wgmma_gated import ACTIVATIONS
from duotone.weights.kernels.cuda.wgmma_gemm import TYPES, macros_of
from duotone.weights.kernels.cuda.wgmma_tiles import WgmmaTile

pytest.importorskip("cuda.core", reason="compiling CUDA sources needs cuda-core and NVRTC")

import torch

TILES = [
    WgmmaTile(16, 1),
    WgmmaTile(256, 2),
    WgmmaTile(192, 3),
    WgmmaTile(160, 2, 2, sub_blocks=2),
    WgmmaTile(112, 2, 3, sub_blocks=2),
]
# Of all that is chosen for gates: those with the most registers, and the smallest.
GATED_TILES = [WgmmaTile(tokens, 2, 2, sub_blocks) for tokens in (16, 160) for sub_blocks in (1, 2)]
SOURCES = Sources("duotone.weights.kernels.cuda")


def compiled(macros: dict[str, int]) -> bytes:
    return SOURCES.compiled(wgmma_gemm.SOURCE, "sm_90a", macros)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUOTONE_CACHE", str(tmp_path))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_compiles_without_a_stack(tile: WgmmaTile) -> None:
    binary = compiled(macros_of(tile))
    assert stack_of(binary) == 0


def test_compiles_with_everything_in_the_epilogue() -> None:
    half, single = TYPES[torch.float16], TYPES[torch.float32]
    plain, full = (
        compiled(macros_of(WgmmaTile(96), single, True, False, **given))
        for given in ({}, {"x0": half, "w0": half, "bias": single})
    )
    assert full != plain
    assert stack_of(full) == 0


@pytest.mark.parametrize("tile", GATED_TILES, ids=str)
def test_gates_compile_without_a_stack(tile: WgmmaTile) -> None:
    for out, per_row, bias in ((torch.bfloat16, False, None), (torch.float32, True, torch.float16)):
        given = {} if bias is None else {"bias": TYPES[bias]}
        for kind in ACTIVATIONS.values():
            binary = compiled(macros_of(tile, TYPES[out], per_row, **given, gated=kind))
            assert stack_of(binary) == 0


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_a_scale_per_row_spills_nothing(tile: WgmmaTile) -> None:
    for out in TYPES.values():
        assert stack_of(compiled(macros_of(tile, out, True))) == 0


def test_unpacking_compiles() -> None:
    for arch in ("sm_80", "sm_90"):
        assert SOURCES.compiled(unpack_int4.SOURCE, arch, unpack_int4.MACROS)


def test_a_gate_has_two_rows() -> None:
    with pytest.raises(Exception, match="64 outs of gate and of up"):
        compiled(macros_of(WgmmaTile(96, 2, 3, sub_blocks=2), gated=1))


def test_another_structure_of_arguments_does_not_compile() -> None:
    with pytest.raises(Exception, match="the host has other arguments"):
        compiled(macros_of(WgmmaTile(16)) | {"ARGUMENTS_BYTES": 1})
