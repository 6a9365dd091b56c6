"""Host code of packing and unpacking as on a GPU, which launches nothing."""

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from duotone.attention import unpack
from duotone.attention.cuda.classes import pack as class_pack
from duotone.attention.cuda.classes import small_levels
from duotone.attention.cuda.classes import stream as class_stream
from duotone.attention.cuda.groups import pack as group_pack
from duotone.attention.cuda.groups import unpack as group_unpack
from duotone.attention.cuda.levels import search as level_search
from duotone.attention.cuda.levels.search import find_levels
from duotone.attention.cuda.packing import dense
from duotone.attention.cuda.short import pack as short_pack
from duotone.attention.cuda.short import unpack as short_unpack
from duotone.attention.cuda.spans import pack as span_pack
from duotone.attention.cuda.spans import searched
from duotone.attention.cuda.spans import stored as span_stored
from duotone.attention.cuda.spans.stored import SpanLayout
from duotone.quant.checks import NOT_FINITE, is_finite


def leave_out_launches(
    monkeypatch: pytest.MonkeyPatch, launch: Callable[[str, Any], None] | None = None
) -> list[str]:
    """Names of kernels that would have been launched, by the host code of CUDA tensors.

    launch: gets each name and what the kernel would have been given.
    """
    names = []

    def kernel(source, name, macros, device):
        def launched(at, given):
            names.append(name)
            if launch is not None:
                launch(name, given)

        return launched

    def sorted_levels(x, spec, spans, coded):
        levels = find_levels(x, spec, spans)
        # PyTorch reads which channel has which levels, that no kernel wrote.
        ctypes.memset(levels.order.data_ptr(), 0, levels.order.nbytes)
        assert is_finite(levels.total, NOT_FINITE)
        return levels

    packing = (class_pack, short_pack, small_levels, level_search, span_pack, group_pack)
    for module in (*packing, dense, short_unpack, group_unpack):
        monkeypatch.setattr(module, "kernel", kernel)
    monkeypatch.setattr(unpack, "has_kernels", lambda device: True)
    for module in (level_search, span_pack):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(span_pack, "held", lambda *_: None)
    monkeypatch.setattr(span_pack, "counters", lambda device, count: (0, None))
    monkeypatch.setattr(group_pack, "has_kernels", lambda device: True)
    monkeypatch.setattr(group_pack, "shared_bytes", lambda device: 232448)
    for module in (class_pack, short_pack, searched):
        monkeypatch.setattr(module, "sorted_levels", sorted_levels)
        monkeypatch.setattr(module, "stored_levels", small_levels.small_rows)
    # No kernel wrote numbers that could be checked.
    monkeypatch.setattr(span_stored, "total", lambda pair: None)
    monkeypatch.setattr(span_stored, "is_finite", lambda total, error: True)
    for layout, module in ((class_stream.ClassLayout, class_stream), (SpanLayout, span_stored)):
        monkeypatch.setattr(
            layout, "pack", lambda self, *given, module=module: module.stored(*given)
        )
    return names
