"""When launches overlap."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from duotone.weights.kernels.triton import overlap as triton_overlap
from duotone.weights.kernels.triton.overlap import overlap_if, overlaps

CPU = torch.device("cpu")


def test_never_without_a_gpu() -> None:
    assert not overlaps(CPU)


def test_switched_off_inside_and_on_again_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_overlap, "_able", lambda device: True)
    assert overlaps(CPU)

    def failing() -> None:
        with overlap_if(False):
            assert not overlaps(CPU)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        failing()
    assert overlaps(CPU)
