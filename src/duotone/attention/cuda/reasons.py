"""Why the CUDA kernels do not read tokens, from specs and shapes alone: no tensor, no GPU.

`decode` asks the same at every call, `explain` before a cache exists.
"""

from __future__ import annotations

from collections.abc import Collection
from types import ModuleType

import torch

from duotone.attention.cuda.classes import decode as class_decode
from duotone.attention.cuda.classes.format import ClassFormat
from duotone.attention.cuda.groups import decode as group_decode
from duotone.attention.cuda.groups.format import (
    GroupFormat,
    operand_of,
    stream_format,
    stream_reason,
)
from duotone.attention.cuda.layouts import visual_reason
from duotone.attention.cuda.shared import runtime
from duotone.attention.cuda.shared.work import QUERY_TYPES
from duotone.attention.cuda.spans import decode as span_decode
from duotone.attention.cuda.spans.layout import RecordFormat
from duotone.quant import TensorSpec

UNTRIED = "the CUDA kernels were never run on such a device; ask for them with impl='cuda'"
NO_MASK = "the CUDA kernels take no mask within a packed segment"
NO_RECORDS = "no segment of this call has its codes in records (QuantizedCache(impl='cuda'))"
CALIBRATED_GROUPS = "score calibration of groups and classes is not in the CUDA kernels"
CALIBRATED_TWICE = "score calibration over several visual segments is not in the CUDA kernels"
SHARED_VISUAL = "layers that share codes have no records of visual tokens"
OTHER_ORDER = (
    "its codes have no records: blocks are shorter than the kernels' tiles, rows were cropped "
    "inside one, or layers that share them need another order"
)

RecordsFormat = RecordFormat | ClassFormat | GroupFormat


def device_reason(device: torch.device, impl: str = "auto") -> str | None:
    """Why no CUDA kernel runs for `impl` on a device, or None."""
    reason = runtime.missing(device)
    return reason or (UNTRIED if impl == "auto" and runtime.is_untried(device) else None)


def query_reason(dtype: torch.dtype) -> str | None:
    """Why the kernels take no query of this type, or None."""
    if dtype in QUERY_TYPES:
        return None
    return f"query must be one of {list(QUERY_TYPES)}; got {dtype}"


# A kernel's module has `fits`, `segment_task` and `CALIBRATES`.
KERNELS = {RecordFormat: span_decode, ClassFormat: class_decode, GroupFormat: group_decode}


def kernel_of(form: RecordsFormat) -> ModuleType:
    """The module whose kernel reads records of a format."""
    return KERNELS[type(form)]


def format_reason(form: RecordsFormat, group: int, ring_bytes: int) -> str | None:
    """Why no kernel reads records of a format for `group` q heads per kv head, or None."""
    if kernel_of(form).fits(form, group, ring_bytes):
        return None
    return f"no CUDA kernel has this shape; got {form} with {group} q heads per kv head"


def span_reason(
    key: TensorSpec, value: TensorSpec, head_dim: int, group: int, ring_bytes: int
) -> str | None:
    """Why the kernels do not read visual tokens of these specs, or None."""
    if reason := visual_reason(key, value):
        return reason
    if key.classes or value.classes:
        form = ClassFormat.of(key, value, head_dim)
    else:
        form = RecordFormat(head_dim, key.bits, value.bits)
    return format_reason(form, group, ring_bytes)


def group_reason(
    key: TensorSpec,
    value: TensorSpec,
    head_dim: int,
    group: int,
    ring_bytes: int,
    apart: Collection[str] = (),
) -> str | None:
    """Why the kernels do not read a stream of these specs, or None.

    apart: "key", "value": codes that several layers read.
    """
    if reason := stream_reason(key, value):
        return reason
    for spec, which in ((key, "key"), (value, "value")):
        operand = operand_of(spec, head_dim, which)
        if isinstance(operand, str):
            return operand
    form = stream_format((key, value), (head_dim, head_dim), apart)
    if form is None:
        return f"no group records for this stream; got head_dim {head_dim}, shared {sorted(apart)}"
    return format_reason(form, group, ring_bytes)
