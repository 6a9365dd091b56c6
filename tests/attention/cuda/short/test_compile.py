"""The kernels compile for sm_80 and sm_90 without a GPU, within what is planned for them."""

import pytest
import torch

import duotone
from cubins import shared_of, stack_of
from duotone.attention.cuda.shared.geometry import SHARED_KIB
from duotone.attention.cuda.short import decode as short_decode
from duotone.attention.cuda.short import pack as short_pack
from duotone.attention.cuda.short import unpack as short_unpack
from duotone.attention.cuda.short.decode import SOURCE, WARPS, Side, form_of, per_sm
from duotone.quant import TensorSpec

from cases import CALIBRATED, SMALL, UNITS
from compile_cases import binary_of, common

needs_nvrtc = pytest.mark.usefixtures("binaries")
LAYER = {bits: duotone.scheme("duotone", bits=bits).at_layer(1) for bits in (1, 2)}
FRONT, BACK = ((policy.key, policy.value) for policy in (LAYER[1].visual, LAYER[2].background))
FORMS = [
    (form_of(*BACK, 64, 81), 1),
    (form_of(*FRONT, 128, 40), 4),
    (form_of(*BACK, 128, 81), 7),
    (form_of(*SMALL, 80, 97), 6),
    (form_of(*UNITS, 256, 81), 1),
    (form_of(*CALIBRATED, 64, 20), 16),
    (form_of(TensorSpec(4), TensorSpec(2), 96, 64), 3),
]


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("form", "group"), FORMS, ids=str)
def test_compiles_with_the_memory_that_is_planned(form, group, arch) -> None:
    blocks = per_sm(form, group, SHARED_KIB[9, 0] << 10)
    own = {"PER_SM": blocks, **short_decode.macros_of(form, group)}
    binary = binary_of(SOURCE, arch, common(form, group, WARPS, short_decode.Arguments) | own)
    if arch == "sm_90":
        static = form.block_bytes(group) - WARPS * form.warp_bytes(group)
        # CUDA keeps 1,024 bytes of every block.
        assert shared_of(binary, "short_decode") <= static + 1024
        assert stack_of(binary) <= 64


@needs_nvrtc
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("spec", [*BACK, UNITS[1], TensorSpec(4)], ids=str)
def test_packing_compiles(spec, dtype) -> None:
    x = torch.empty(1, 1, 1, 80 if spec.classes is None else 64, dtype=dtype)
    macros = short_pack.macros_of(Side.of(spec, x.shape[3]), x)
    assert stack_of(binary_of(short_pack.SOURCE, "sm_90", macros)) == 0


def test_blocks_that_fit_no_multiprocessor_are_not_planned() -> None:
    wide = form_of(TensorSpec(4), TensorSpec(4), 256, 256)
    assert per_sm(wide, 1, SHARED_KIB[9, 0] << 10)
    assert not per_sm(wide, 16, SHARED_KIB[9, 0] << 10)
    assert not per_sm(wide, 1, 16 << 10)


def test_rows_have_the_bytes_of_canonical_packing() -> None:
    odd = TensorSpec(classes=((4, 1 / 16), (2, 1 / 4), (1, 7 / 16)))
    side = Side.of(odd, 80)  # 5, 20 and 35 channels
    assert (side.row_bytes, side.slots) == (3 + 5 + 5, 8 + 24 + 40)
    assert Side.of(TensorSpec(2), 80).row_bytes == 20


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(("form", "_"), FORMS, ids=str)
def test_unpacking_compiles(form, _, arch) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        binary_of(short_unpack.SOURCE, arch, short_unpack.macros_of(form, dtype))
