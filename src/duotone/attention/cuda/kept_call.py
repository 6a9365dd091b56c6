"""Launches of the last call over packed segments, made again while only addresses differ.

To choose and prepare launches takes Python longer than a device needs to run them. A decode step
brings a new query and new 16-bit tokens; packed tokens are the objects of the step before. A thread
keeps the launches of its last call with such objects, as long as they exist.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from duotone.attention.choice import Read
from duotone.attention.cuda.rotate.queries import rotated_query
from duotone.attention.cuda.shared.launch import Launched, is_aligned
from duotone.attention.cuda.shared.runtime import PreparedLaunch
from duotone.attention.cuda.shared.work import Fields
from duotone.attention.family import Family
from duotone.attention.rotated import SegmentQueries, Wants
from duotone.cache.packed import PackedTensor
from duotone.cache.pair import LaidOut
from duotone.cache.segments import PackedSegment, Segment
from duotone.tools.devices import on_device

_LOCAL = threading.local()


def kept_call(
    query: Tensor, kv: Sequence[Segment], sm_scale: float, tau: tuple[float, float] | None
) -> Callable[[], Tensor] | None:
    """The call by kept launches; None where there are none that fit. Arguments as in `keep`."""
    packed = _first_packed(kv)
    if packed is None:
        return None
    found = _kept().get(id(packed))
    if found is None or found[0]() is not packed:
        return None
    query, present = query.contiguous(), [segment for segment in kv if segment.tokens]
    call = found[1]
    if call.settings != _settings(query, sm_scale, tau):
        return None
    fields = call.fields(query, present)
    return None if fields is None else partial(call, query, present, fields)


def keep(
    query: Tensor,
    read: Sequence[Read],
    order: Sequence[int],
    launched: Launched,
    *,
    sm_scale: float,
    tau: tuple[float, float] | None,
) -> None:
    """Keep the launches of a call.

    read: its segments with tokens, each with its family. order: their places in the order of
    `launched`.
    """
    known = all(isinstance(launch, PreparedLaunch) for launch in launched.made)
    packed = _first_packed([segment for _, segment in read])
    if packed is None or not known:
        return
    parts = [_Part(number, *read[number]) for number in order]
    turns = any(Wants.of(segment) != (None, None) for _, segment in read)
    call = KeptCall(_settings(query, sm_scale, tau), parts, launched, turns)
    kept, address = _kept(), id(packed)
    kept[address] = weakref.ref(packed, lambda _: kept.pop(address, None)), call


def _kept() -> dict[int, tuple[weakref.ref[LaidOut | PackedTensor], KeptCall]]:
    """Calls that this thread keeps, by the address of their first packed part."""
    if not hasattr(_LOCAL, "kept"):
        _LOCAL.kept = {}
    return _LOCAL.kept


def _first_packed(kv: Sequence[Segment]) -> LaidOut | PackedTensor | None:
    return next((part for segment in kv for part in _objects(segment)), None)


def _settings(query: Tensor, sm_scale: float, tau: tuple[float, float] | None) -> Hashable:
    """Gather what launches depend on besides the segments."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    return query.shape, query.dtype, query.device, sm_scale, tau, is_deterministic


class _Part:
    """One segment of a kept call, by its place among those with tokens; keeps no tensor alive."""

    def __init__(self, number: int, family: Family, segment: Segment) -> None:
        self.number, self.again = number, family.again
        self.kind, given = _kind(segment), family.again(segment)
        self.alike = None if given is None else given[0]
        self.objects = [weakref.ref(x) for x in _objects(segment)]

    def fields(self, segment: Segment) -> Fields | None:
        """Arguments that follow tensors of a segment; None where the launch does not fit it."""
        if _kind(segment) != self.kind or segment.mask is not None:
            return None
        pairs = zip(self.objects, _objects(segment), strict=True)
        if not all(reference() is x for reference, x in pairs):
            return None
        again = self.again(segment)
        return None if again is None or again[0] != self.alike else again[1]


def _kind(segment: Segment) -> Hashable:
    return type(segment), segment.visual, segment.key_norm is None, segment.records is None


def _objects(segment: Segment) -> tuple[LaidOut | PackedTensor, ...]:
    """Objects that hold all packed parts: they are immutable."""
    if not isinstance(segment, PackedSegment):
        return ()
    records = () if segment.records is None else (segment.records,)
    return (*records, segment.key, segment.value)


@dataclass(frozen=True)
class KeptCall:
    """Launches over the packed objects of one call.

    settings: of `_settings`. parts: segments in the order of launches. turns: some segment wants
    another query than the caller's.
    """

    settings: Hashable
    parts: list[_Part]
    launched: Launched
    turns: bool

    def fields(self, query: Tensor, kv: Sequence[Segment]) -> list[Fields] | None:
        """Arguments of each launch that follow the segments' tensors; None where one does not fit.

        kv: segments with tokens.
        """
        if len(kv) != len(self.parts) or not is_aligned(query):
            return None
        found = []
        for part in self.parts:
            if (fields := part.fields(kv[part.number])) is None:
                return None
            found.append(fields)
        return found

    def __call__(self, query: Tensor, kv: Sequence[Segment], fields: list[Fields]) -> Tensor:
        """Launch for tensors that fit."""
        with on_device(query.device):
            made = SegmentQueries(query, rotated_query) if self.turns else None
            for part, own in zip(self.parts, fields, strict=True):
                rotated = query if made is None else made.of(kv[part.number])
                own["query"] = rotated.data_ptr()
            out = torch.empty_like(query)
            self.launched.again(fields, out)
            return out
