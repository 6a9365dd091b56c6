"""Which layout holds visual tokens: records of codes of one width, or of classes of channels."""

from __future__ import annotations

from duotone.attention.cuda import class_layout, layout
from duotone.cache import PackedTensor
from duotone.cache.pair import LaidOut
from duotone.quant import TensorSpec


def visual_reason(key: TensorSpec, value: TensorSpec) -> str | None:
    """Why no layout of visual tokens holds codes of these specs, or None."""
    of = class_layout if key.classes or value.classes else layout
    return of.spec_reason(key, value)


def visual_layout(key: PackedTensor, value: PackedTensor) -> LaidOut | None:
    """The records that hold these, if any do."""
    classes = key.spec.classes or value.spec.classes
    return (class_layout.class_layout if classes else layout.span_layout)(key, value)
