"""Warps take records in turn where torch is told to be deterministic, and draw them elsewhere."""

from collections.abc import Iterator

import pytest
import torch
from launch_cases import span_launch

from duotone.attention.cuda.classes import decode as class_decode
from duotone.attention.cuda.classes.format import ClassFormat
from duotone.attention.cuda.groups import decode as group_decode
from duotone.attention.cuda.groups.format import GroupFormat, Operand
from duotone.attention.cuda.spans import calibrated as span_calibrated
from duotone.attention.cuda.spans import decode as span_decode
from duotone.attention.cuda.spans.layout import RecordFormat

from cases import CALIBRATED
from compile_cases import compiled

SPAN, CLASSES = RecordFormat(128, 1, 1), ClassFormat.of(*CALIBRATED, 128)
GROUPS = GroupFormat(128, *[Operand(2, False, 32, False)] * 2)
# module, format and what it is compiled with beside the number of warps
KERNELS = {
    span_decode.SOURCE: (span_decode, SPAN, False),
    span_calibrated.SOURCE: (span_decode, SPAN, True),
    class_decode.SOURCE: (class_decode, CLASSES, None),
    group_decode.SOURCE: (group_decode, GROUPS, None),
}


@pytest.fixture
def deterministic() -> Iterator[None]:
    """Ask torch for deterministic algorithms, as a caller does."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_records_are_drawn_by_default(caught) -> None:
    assert "IN_TURN" not in span_launch(caught)[-1].macros


@pytest.mark.usefixtures("deterministic")
def test_deterministic_calls_take_them_in_turn(caught) -> None:
    assert span_launch(caught)[-1].macros["IN_TURN"] == 1


@pytest.mark.usefixtures("binaries")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("source", KERNELS)
def test_every_kernel_with_a_ring_compiles_both_ways(source, arch) -> None:
    module, form, own = KERNELS[source]
    drawn, taken = (compiled(arch, module, form, 4, 8, own, source, IN_TURN=n) for n in (0, 1))
    assert drawn != taken
