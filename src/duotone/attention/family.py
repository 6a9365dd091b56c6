"""A family of decode kernels: the tokens that it reads, and why it reads no others."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from duotone.attention.cuda.shared.geometry import shared_bytes
from duotone.attention.refused import reason_against
from duotone.cache.pair import Layout
from duotone.cache.segments import Segment
from duotone.quant import TensorSpec
from duotone.quant.honours import Honours


@dataclass(frozen=True)
class Tokens:
    """Tokens of one kind in one layer: all that decides, before a call, who reads them.

    key, value: their quantizers, or the types of K and V that are not packed. head_dims: of K and
    of V. group: q heads per kv head. query: type of q. shared_bytes: what a block of threads may
    have. calibrated: visual segments whose scores one range calibrates; 0: these scores stay.
    apart: "key", "value": codes that several layers read. masked: queries see some of the tokens.
    form: format of records that exist; None: the family makes it of the quantizers.
    """

    key: TensorSpec | torch.dtype
    value: TensorSpec | torch.dtype
    head_dims: tuple[int, int]
    group: int
    query: torch.dtype
    shared_bytes: int
    calibrated: int = 0
    apart: frozenset[str] = frozenset()
    masked: bool = False
    form: Any = None

    @classmethod
    def of(cls, query: Tensor, segment: Segment, calibrated: int = 0) -> Tokens:
        """Tokens of a segment of a call. calibrated: segments of one range, if it is visual."""
        records = segment.records
        return cls(
            *segment.kept_as,
            segment.head_dims,
            query.shape[1] // segment.heads[1],
            query.dtype,
            shared_bytes(query.device),
            calibrated if segment.visual else 0,
            masked=segment.mask is not None,
            form=None if records is None else records.format,
        )


@dataclass(frozen=True)
class Family:
    """Decode kernels of one form of tokens.

    impl: implementation that it belongs to. name: of the form, a plural. kinds: of a layer's
    tokens, as `plan.resolve` names them. honours, packs: choices of a quantizer that its decoder
    and its packing kernels honour.
    takes: True for tokens of this form, by their quantizers. holds: True for a segment in it.
    rule: raises `RefusedError` for tokens that no kernel reads; at_call: for tensors of a call.
    task: makes the launch over one segment from (query, segment, tau). layout: its order of codes.
    again: for the next call, (equal for segments that one launch fits, arguments that follow the
    segment's tensors); None from it: no kernel reads these. Packed parts must be the last call's.
    unpack: writes dense K and V of a segment, in a given type and in their basis; raises
    `RefusedError` where no kernel does. Tokens past a sequence's end hold anything.
    """

    impl: Literal["cuda", "triton", "reference"]
    name: str
    kinds: tuple[str, ...]
    honours: Honours
    takes: Callable[[Tokens], bool]
    holds: Callable[[Segment], bool]
    rule: Callable[[Tokens], None]
    at_call: Callable[[Tensor, Segment, Tokens], None] | None = None
    packs: Honours | None = None
    task: Callable[[Tensor, Segment, tuple[float, float] | None], Any] | None = None
    layout: Layout | None = None
    again: Callable[[Segment], tuple[Hashable, dict[str, Any]] | None] = lambda segment: (None, {})
    unpack: Callable[[Segment, torch.dtype], tuple[Tensor, Tensor]] | None = None

    def refusal(
        self, tokens: Tokens, query: Tensor | None = None, segment: Segment | None = None
    ) -> str | None:
        """Rule that tokens break, and their choice after a semicolon; None: they are read.

        query, segment: of a call, whose tensors may break rules, too.
        """
        reason = _known_reason(self.rule, tokens)
        if reason is not None or segment is None or self.at_call is None:
            return reason
        return reason_against(self.at_call, query, segment, tokens)


_known_reason = cache(reason_against)
