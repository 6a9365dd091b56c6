"""Choose the families that read the segments of one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from duotone.attention.cuda.shared import runtime
from duotone.attention.families import FAMILIES
from duotone.attention.family import Family, Tokens
from duotone.attention.triton.family import first_refusal
from duotone.cache.segments import PackedSegment, Segment

# Dense tokens per sequence that no implementation takes long for.
FEW_TOKENS = 1024
NO_RECORDS = "no segment of this call has its codes in records (QuantizedCache(impl='cuda'))"
OTHER_ORDER = (
    "its codes have no records: rows were cropped inside a block, or layers that share them need "
    "another order"
)
# A segment and the family whose order it has; one that the CUDA kernels leave has a reason.
Read = tuple[Family, Segment]
Left = tuple[Family, Segment, str]


@dataclass(frozen=True)
class Choice:
    """Implementation of one call.

    read: segments that CUDA kernels read, each with its family. others: segments that Triton reads
    among them. reasons: why slow paths are taken. against: why no CUDA kernel runs, or None.
    """

    impl: str
    read: list[Read] = field(default_factory=list)
    others: list[Segment] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    against: str | None = None


def choose(query: Tensor, kv: Sequence[Segment], tau: tuple[float, float] | None = None) -> Choice:
    """The CUDA kernels, where they read one segment at least and Triton the others; else Triton.

    A segment in records that the kernels do not read takes the whole call away from them. Where
    Triton does not read the call either, the reference does.
    """
    calibrated = 0 if tau is None else sum(segment.visual for segment in kv)
    read: list[Read] = []
    left: list[Left] = []
    for segment in kv:
        if not segment.tokens:
            continue
        family, reason = _reader(query, segment, calibrated)
        if reason is None:
            read.append((family, segment))
        else:
            left.append((family, segment, reason))
    others = [segment for _, segment, _ in left]
    in_records = (why for _, segment, why in left if segment.records is not None)
    against = runtime.missing(query.device) or next(in_records, None)
    if against is None and not any(isinstance(x, PackedSegment) for _, x in read):
        against = NO_RECORDS
    if against is None and others:
        against = first_refusal(query, others)
    if against is None:
        return Choice("cuda", read, others, [why for _, _, why in left])
    if refused := first_refusal(query, kv):
        return Choice("reference", reasons=[refused], against=against)
    return Choice("triton", reasons=_causes(query, left, kv, against), against=against)


def _reader(query: Tensor, segment: Segment, calibrated: int) -> tuple[Family, str | None]:
    """The family whose order a segment has, and why the CUDA kernels do not read it."""
    tokens = Tokens.of(query, segment, calibrated)
    family = next(family for family in FAMILIES if family.holds(segment))
    if family.impl == "cuda":
        return family, family.refusal(tokens, query, segment)
    kind = "visual" if segment.visual else "text"
    meant = next(f for f in FAMILIES if kind in f.kinds and f.takes(tokens))
    return family, meant.refusal(tokens) or OTHER_ORDER


def _causes(query: Tensor, left: list[Left], kv: Sequence[Segment], against: str) -> list[str]:
    """Causes, of which `against` may be a consequence: that no segment has records."""
    if against != NO_RECORDS:
        return [against]
    if untried := runtime.refusal(query.device, "auto"):
        return [untried]
    # Dense tokens alone are no cause: they are in the order of their family.
    if packed := [why for _, segment, why in left if isinstance(segment, PackedSegment)]:
        return packed
    # Up to there every implementation takes the time of its launches.
    few = max(segment.tokens for segment in kv) <= FEW_TOKENS
    return [] if few else ["no token of this cache is packed (yet)"]
