"""Codes of 4 bits unpacked by the kernel's own source on a CPU, and which weights it takes."""

import ctypes
from dataclasses import replace

import pytest
import torch

from duotone.tools.nvrtc import Sources
from duotone.weights.kernels.cuda import unpack_int4
from duotone.weights.kernels.cuda.unpack_int4 import MACROS, SIXTEEN, SOURCE, Arguments

from cuda_on_cpu import compiled, missing
from linear_cases import random_weight

SOURCES = Sources("duotone.weights.kernels.cuda")


def unpacked(packed: torch.Tensor, folder) -> torch.Tensor:
    launch = compiled(SOURCE, "unpack_int4", MACROS, folder, SOURCES.text)
    codes, sixteens = torch.full((2 * packed.numel(),), 99, dtype=torch.int8), packed.numel() // 16
    given = Arguments(packed.data_ptr(), codes.data_ptr(), sixteens)
    launch(ctypes.byref(given), -(-sixteens // MACROS["THREADS"]), 1, 1, MACROS["THREADS"])
    return codes


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.parametrize(("outs", "ins"), [(128, 16), (136, 144), (256, 1040)])
def test_codes_are_sixteen_times_the_weight_s(outs, ins, tmp_path) -> None:
    weight = random_weight(outs, ins, 4)
    found = unpacked(weight.codes, tmp_path).view(outs, ins)
    assert torch.equal(found.int(), 16 * weight.unpacked().int())
    wrong = unpacked(weight.codes ^ 1, tmp_path).view(outs, ins)
    assert not torch.equal(wrong, found)


def test_a_weight_begins_at_a_sixteen_and_has_whole_ones() -> None:
    weight = random_weight(128, 32, 4)
    assert unpack_int4.takes(weight)
    assert not unpack_int4.takes(random_weight(3, 8, 4))
    moved = torch.empty(weight.codes.numel() + SIXTEEN, dtype=torch.uint8)
    start = -moved.data_ptr() % SIXTEEN + 1
    codes = moved[start : start + weight.codes.numel()].view_as(weight.codes)
    assert not unpack_int4.takes(replace(weight, codes=codes))


def test_a_launch_is_made_once_a_weight(monkeypatch) -> None:
    made, run = [], []

    class Kernel:
        def prepared(self, at, given):
            made.append((at.blocks, given.packed, given.codes, given.sixteens))
            return run.append

    monkeypatch.setattr(unpack_int4, "_sources", type("S", (), {"kernel": lambda *_: Kernel()}))
    monkeypatch.setattr(unpack_int4, "stream_handle", lambda index: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    unpack_int4._prepared.cache_clear()
    weights = [random_weight(128, ins, 4) for ins in (64, 32)]
    try:
        for weight in (*weights, *weights):
            codes = unpack_int4.unpacked_times_16(weight)
            assert codes.shape == weight.shape
    finally:
        unpack_int4._prepared.cache_clear()
    assert [(n, packed) for n, packed, *_ in made] == [
        (1, weight.codes.data_ptr()) for weight in weights
    ]
    assert [sixteens for *_, sixteens in made] == [256, 128]
    assert run == [7, 7, 7, 7]
