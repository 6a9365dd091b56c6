"""Kernels for channels of unequal bits compile for sm_80 and sm_90 without a GPU."""

import pytest

import duotone
from cubins import shared_of
from duotone.attention.cuda.classes import decode as class_decode
from duotone.attention.cuda.classes.format import ClassFormat
from duotone.attention.cuda.shared.geometry import VARIABLES_BYTES
from duotone.quant import TensorSpec

from cases import CALIBRATED, SMALL, SMALL_TILES, UNITS
from compile_cases import RINGS, compiled

needs_nvrtc = pytest.mark.usefixtures("binaries")


def class_format(bits: int, head_dim: int) -> ClassFormat:
    visual = duotone.scheme("duotone-whole", bits=bits).visual
    return ClassFormat.of(visual.key, visual.value, head_dim)


@needs_nvrtc
@pytest.mark.parametrize(
    ("bits", "head_dim", "group"),
    [(1, 128, 4), (1, 64, 1), (1, 128, 7), (2, 128, 4), (2, 64, 7), (2, 256, 6)],
)
def test_class_decode_compiles(bits, head_dim, group) -> None:
    compiled("sm_90", class_decode, class_format(bits, head_dim), group)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("head_dim", "group"), [(128, 4), (80, 7), (64, 16)])
def test_class_decode_compiles_for_small_tiles(head_dim, group, arch) -> None:
    compiled(arch, class_decode, ClassFormat.of(*SMALL_TILES, head_dim), group)


SPAN_CLASSES = [
    (ClassFormat.of(*CALIBRATED, 128), 4, 16),
    (ClassFormat.of(*CALIBRATED, 80), 16, 8),
    (ClassFormat.of(*UNITS, 64), 7, 16),
    (ClassFormat.of(*SMALL, 128), 4, 16),
    (ClassFormat.of(UNITS[0], SMALL[1], 80), 7, 16),
    (ClassFormat.of(*UNITS, 256), 6, 8),
    (ClassFormat.of(TensorSpec(4), UNITS[1], 96), 1, 16),
    (ClassFormat.of(UNITS[0], TensorSpec(1), 128), 12, 8),
    (ClassFormat.of(*[TensorSpec(classes=((1, 1 / 8),))] * 2, 64), 16, 16),
]


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("form", "group", "warps"), SPAN_CLASSES, ids=str)
def test_class_decode_compiles_without_groups_of_k(form, group, warps, arch) -> None:
    assert class_decode.warps_of(form, group, RINGS[arch])
    assert class_decode.warps_of(form, group) == warps
    binary = compiled(arch, class_decode, form, group, warps)
    if arch == "sm_90":
        planned = class_decode.beside_rings(form, group, warps)
        assert shared_of(binary, "class_decode") == planned


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("form", "group", "sub_blocks"),
    [(class_format(1, 128), 4, 4), (class_format(1, 128), 8, 2), (class_format(2, 256), 4, 2)],
    ids=str,
)
def test_class_decode_compiles_with_sub_blocks(form, group, sub_blocks, arch) -> None:
    warps = class_decode.warps_of(form, group) // sub_blocks
    binary = compiled(arch, class_decode, form, group, warps, SUB_BLOCKS=sub_blocks)
    if arch == "sm_90":
        planned = sub_blocks * class_decode.beside_rings(form, group, warps)
        assert shared_of(binary, "class_decode") <= planned <= VARIABLES_BYTES


def test_more_sums_than_registers_are_not_for_class_decode() -> None:
    form = ClassFormat.of(TensorSpec(4), UNITS[1].replace(classes=((2, 1.0),)), 256)
    assert class_decode.warps_of(form, 8)
    assert not class_decode.warps_of(form, 12)
    assert not class_decode.warps_of(form, 17)


@pytest.mark.parametrize(("bits", "blocks"), [(1, (1, 2, 4)), (2, (1, 2))])
def test_beginnings_of_blocks_stand_beside_the_rings(bits, blocks) -> None:
    form = class_format(bits, 128)
    assert class_decode.warps_of(form, 4) == 16
    assert class_decode.per_sm(form, 4, 16) == blocks
