"""Layout of visual tokens: records of codes of one width, or of classes of channels."""

from __future__ import annotations

from torch import Tensor

from duotone.attention.cuda.classes import layout as class_layout
from duotone.attention.cuda.classes.pack import ClassLayout
from duotone.attention.cuda.spans import layout
from duotone.attention.cuda.spans.pack import SpanLayout
from duotone.cache import PackedTensor
from duotone.cache.ledger import Piece
from duotone.cache.pair import LaidOut, PackedPair
from duotone.quant import KVSpec, TensorSpec


def visual_reason(key: TensorSpec, value: TensorSpec) -> str | None:
    """Why no layout of visual tokens holds codes of these specs, or None."""
    of = class_layout if key.classes or value.classes else layout
    return of.spec_reason(key, value)


class VisualLayout:
    """Layout of visual tokens in a cache on CUDA (`cache.pair.Layout`)."""

    def __call__(self, key: PackedTensor, value: PackedTensor) -> LaidOut | None:
        """The records that hold these, if any do."""
        return _layout(key.spec, value.spec)(key, value)

    def pack(self, key: Tensor, value: Tensor, spec: KVSpec, piece: Piece) -> PackedPair | None:
        """Quantize dense K and V into records; None where torch has to."""
        return _layout(spec.key, spec.value).pack(key, value, spec, piece)


def _layout(key: TensorSpec, value: TensorSpec) -> ClassLayout | SpanLayout:
    return ClassLayout() if key.classes or value.classes else SpanLayout()
