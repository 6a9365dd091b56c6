"""Rows of the kernel table: a scheme by one implementation, or a backend on dense K and V."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from duotone.attention import decode_attention
from duotone.attention.choice import choose
from duotone.attention.cuda.groups.family import GROUPS
from duotone.attention.families import FAMILIES
from duotone.attention.family import Tokens
from duotone.attention.triton.family import first_refusal
from duotone.bench.baselines import TOLERANCE, Baseline, UnavailableError
from duotone.bench.problems import Bytes, Problem, bytes_of, random_dense, random_query
from duotone.bench.schemes import BenchScheme
from duotone.bench.shapes import Shape
from duotone.cache.pair import PackedPair
from duotone.cache.segments import PackedSegment

# Stages of implementations: NVRTC takes a second per kernel, Triton several.
STAGES = {"cuda": 0, "triton": 1, "reference": 3}
COMPILED_STAGE = 2
IMPLS = tuple(STAGES)
# Relative RMS and maximum error against `attention.reference` in fp64, rounded to the query's type.
PACKED_TOLERANCE = (2e-3, 1e-2)


@dataclass(frozen=True)
class PackedRow:
    """A scheme by one of our implementations.

    tolerance: largest allowed relative RMS and maximum error.
    """

    scheme: BenchScheme
    impl: str
    tolerance: tuple[float, float] = PACKED_TOLERANCE

    @property
    def name(self) -> str:
        """Name of the storage of K and V."""
        return self.scheme.name

    @property
    def bits(self) -> float:
        """Nominal bits per number of K and V."""
        return self.scheme.bits

    @property
    def stage(self) -> int:
        """Stage of the measurement; later stages hold rows that are slow to start."""
        return STAGES[self.impl]

    def problem(self, shape: Shape, device: torch.device) -> Problem:
        """A call with random contents, codes in canonical order. Errors: UnavailableError."""
        reason = self.scheme.reason(shape)
        if reason is not None:
            raise UnavailableError(reason)
        return self.scheme.problem(shape, device)

    def lay_out(self, problem: Problem) -> Problem:
        """The problem in this implementation's layout. Errors: UnavailableError."""
        return laid_out(problem, self.scheme.shared) if self.impl == "cuda" else problem

    def call(self, problem: Problem) -> Callable[[], Tensor]:
        """`decode_attention`. Errors: UnavailableError, with the implementation's own reason."""
        reason = _against(self.impl, problem)
        if reason is not None:
            raise UnavailableError(reason)
        return lambda: decode_attention(
            problem.query,
            problem.segments,
            sm_scale=problem.sm_scale,
            tau=problem.tau,
            impl=self.impl,
        )

    def nbytes(self, problem: Problem) -> Bytes:
        """Bytes that the call must read, by the containers' count."""
        return bytes_of(problem)


def laid_out(problem: Problem, shared: bool = False) -> Problem:
    """The problem with packed codes in the CUDA kernels' layout.

    shared: codes are stored separately from scales, as in a layer that shares codes. Errors:
    UnavailableError.
    """
    given = (problem.query, shared)
    segments = (
        _segment_laid_out(segment, *given) if isinstance(segment, PackedSegment) else segment
        for segment in problem.segments
    )
    return replace(problem, segments=tuple(segments))


def _segment_laid_out(segment: PackedSegment, query: Tensor, shared: bool) -> PackedSegment:
    pair = PackedPair(segment.key, segment.value)
    for family in FAMILIES:
        layout = family.layout
        if layout is None or (shared and "text" not in family.kinds):
            continue
        laid = pair.laid_out(layout.sharing(("key", "value"), ()) if shared else layout)
        if laid.records is not None:
            return replace(segment, key=laid.key, value=laid.value, records=laid.records)
    # After "; " the reason names the spec, which the row names already.
    reason = GROUPS.refusal(Tokens.of(query, segment))
    reason = reason or "the CUDA kernels have no layout for these blocks"
    raise UnavailableError(reason.partition("; ")[0])


def _against(impl: str, problem: Problem) -> str | None:
    """Why an implementation does not run this call, or None."""
    if impl == "triton":
        return first_refusal(problem.query, problem.segments)
    return choose(problem.query, problem.segments, problem.tau).against if impl == "cuda" else None


@dataclass(frozen=True)
class DenseRow:
    """A backend of others; attributes and methods are those of `PackedRow`.

    impl: None, where a packed row names one of our implementations.
    """

    baseline: Baseline
    impl: None = None
    bits: int = 16
    tolerance: tuple[float, float] = TOLERANCE

    @property
    def name(self) -> str:
        """The backend's."""
        return self.baseline.name

    @property
    def stage(self) -> int:
        """The first stage, or the stage of long compilations."""
        return COMPILED_STAGE if self.baseline.compiled else 0

    def problem(self, shape: Shape, device: torch.device) -> Problem:
        """Dense K and V."""
        query = random_query(shape, device)
        return Problem(query, (random_dense(shape, shape.tokens, device),), shape.head_dim**-0.5)

    def lay_out(self, problem: Problem) -> Problem:
        """The problem, unchanged: `prepare` knows the backend's layout."""
        return problem

    def call(self, problem: Problem) -> Callable[[], Tensor]:
        """The backend's call. Errors: UnavailableError."""
        (segment,) = problem.segments
        return self.baseline.prepare(problem.query, segment.key, segment.value, problem.sm_scale)

    def nbytes(self, problem: Problem) -> Bytes:
        """K and V."""
        return bytes_of(problem)


# One line of a shape's table.
Row = PackedRow | DenseRow
