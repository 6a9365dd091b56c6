"""Which layout holds the visual codes of a spec."""

from __future__ import annotations

from duotone.attention.cuda import class_layout, layout
from duotone.cache.pair import Layout
from duotone.quant import TensorSpec


def layout_of(key: TensorSpec, value: TensorSpec) -> Layout | str:
    """The layout for codes of these specs, or why no kernel has one."""
    if key.classes or value.classes:
        return class_layout.spec_reason(key, value) or class_layout.class_layout
    return layout.spec_reason(key, value) or layout.span_layout
