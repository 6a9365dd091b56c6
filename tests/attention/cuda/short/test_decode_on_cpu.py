"""The source of `short/decode.cu` on a CPU: codes of all widths, parameters, spans, parts."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from duotone.attention.cuda.shared import launch, runtime
from duotone.attention.cuda.shared.geometry import Geometry
from duotone.attention.cuda.short import decode as short_decode
from duotone.attention.cuda.short.decode import WARPS, short_task
from duotone.quant import TensorSpec

from cases import CALIBRATED, SMALL, UNITS, Case, assert_near, build, poisoned, reference
from cuda_on_cpu import missing
from units_on_cpu import ASSEMBLY, compiled

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
# Copies happen at once.
COPIES = {"[%1],16;": "copy(address + at, source + at, 16, 0);"}
HALVES, SPANS, BYTES = ({"key": k, "value": v} for k, v in (UNITS, CALIBRATED, SMALL))
PLAIN = {"key": TensorSpec(2), "value": TensorSpec(1)}
PLAIN_BYTES = {"key": TensorSpec(4, param_dtype="float8"), "value": SMALL[1]}
CASES = [
    Case((49, 98, 0, 30), **BYTES, spans=3, kv_heads=2, gqa=1),
    Case((162, 81, 5, 1), **HALVES, spans=2, gqa=4),
    Case((162, 40), **SPANS, spans=2, gqa=7, head_dim=128),
    Case((64, 33), **PLAIN, spans=1, gqa=6, head_dim=80),
    Case((200, 3), **PLAIN_BYTES, spans=1, gqa=2, head_dim=96, key_norm=True),
    Case((40,), **BYTES, spans=5, gqa=1, head_dim=256),
    Case((70, 9), **BYTES, spans=9, gqa=16),
]


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    """Launches run here, as if on a device of so many multiprocessors."""

    def kernel(source, name, macros, device):
        emulated = {"STAGES": 1} | dict(macros) | {"LATE": 0, "__CUDA_ARCH__": 900}
        text = runtime.source_text(source)
        run = compiled(name, emulated, tmp_path, text, COPIES | ASSEMBLY)
        return lambda at, given: run(given, at.blocks, at.threads)

    def counters(device, count):
        zeros = torch.zeros(count, dtype=torch.int32)
        return zeros.data_ptr(), zeros

    def patch(sms: int) -> None:
        monkeypatch.setattr(launch, "kernel", kernel)
        monkeypatch.setattr(launch, "counters", counters)
        for module in (launch, short_decode):
            monkeypatch.setattr(module, "multiprocessors", lambda device: sms)
        monkeypatch.setattr(short_decode, "shared_bytes", lambda device: 227 << 10)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    return patch


def attended(case: Case, parts: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(output of the kernel, that of the reference) in fp32."""
    query, kv = build(replace(case, dtype=torch.float32))
    (segment,) = poisoned(kv)
    norm = segment.key_norm
    scaled = query if norm is None else query * norm.repeat_interleave(case.gqa, 1)[:, :, None]
    task = short_task(scaled.contiguous(), segment)
    if parts is not None:
        task = replace(task, at=Geometry(WARPS, task.at.per_sm, parts))
    out = torch.full_like(query, torch.nan)
    launch.run([task], case.sm_scale, out)
    return out, reference(replace(case, dtype=torch.float32), query, kv)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_the_reference(case: Case, on_cpu) -> None:
    on_cpu(4)
    assert_near(*attended(case))


@pytest.mark.parametrize(("sms", "parts"), [(132, 1), (132, 3), (1, 2)])
def test_parts_are_merged(sms, parts, on_cpu) -> None:
    """By the block that ends last, or by a launch where there are many kv heads."""
    on_cpu(sms)
    assert_near(*attended(CASES[0], parts))
