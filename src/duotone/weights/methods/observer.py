"""Statistics of linears' inputs: largest magnitudes by modality, second moments, channel maxima.

One observer watches the linears of one unit (a block, a projector) while calibration data run
through it; rows that are padding do not count. Linears with the very same input share their
statistics.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from duotone.weights.equivalences.hadamard import HadamardPlan
from duotone.weights.equivalences.online import RotatedInput
from duotone.weights.modules.encode import features

TEXT, VISUAL = "text", "visual"
Linear = nn.Linear | RotatedInput


@dataclass(frozen=True)
class Rows:
    """Bool masks [rows] of the run: `real` tokens (no padding), `visual` ones; None: all, none."""

    real: Tensor | None = None
    visual: Tensor | None = None

    def split(self, x: Tensor) -> dict[str, Tensor]:
        """x [rows, channels] by modality, without padding. Without a mask all counts as text.

        Errors: ValueError where a mask has another number of rows.
        """
        for mask in (self.real, self.visual):
            if mask is not None and len(mask) != len(x):
                raise ValueError(f"masks must have one entry per row, got {len(mask)} for {len(x)}")
        real = self.real
        if self.visual is None:
            return {TEXT: x if real is None else x[real]}
        kept = torch.ones_like(self.visual) if real is None else real
        return {TEXT: x[kept & ~self.visual], VISUAL: x[kept & self.visual]}


@dataclass
class Statistics:
    """Statistics of one input: X^T X [columns, columns] float32, and tokens by modality.

    limits: max |x| by modality, of those seen. largest, absolute: max |x| and sum |x| [columns],
    float32.
    """

    limits: dict[str, float] = field(default_factory=dict)
    moments: Tensor | None = None
    largest: Tensor | None = None
    absolute: Tensor | None = None
    tokens: dict[str, int] = field(default_factory=dict)

    @property
    def average(self) -> Tensor:
        """Mean |x| [columns]."""
        return self.absolute / max(sum(self.tokens.values()), 1)


@dataclass(frozen=True)
class Wanted:
    """Choice of statistics to gather; absolute: sums of |x|."""

    limits: bool = False
    moments: bool = False
    largest: bool = False
    absolute: bool = False


def plan_of(module: Linear) -> HadamardPlan | None:
    """The online transform of a linear's input, None without one."""
    return module.plan if isinstance(module, RotatedInput) else None


class Observer:
    """Statistics of the inputs of `linears` {path: module}.

    split: paths whose channel 0 stays floating point and has no part in limits.
    """

    def __init__(
        self,
        linears: Mapping[str, Linear],
        wanted: Wanted,
        split: frozenset[str] = frozenset(),
        impl: str = "auto",
    ) -> None:
        self.linears, self.wanted, self.split, self.impl = dict(linears), wanted, split, impl
        self.statistics: dict[str, Statistics] = {}
        self.leader: dict[str, str] = {}
        self.rows = Rows()
        self._last: tuple[str, Tensor] | None = None

    def of(self, path: str) -> Statistics:
        """Statistics of one linear's input. Errors: ValueError if the linear has never run."""
        if path not in self.leader:
            raise ValueError(
                f"{path!r} got no input during calibration; does the model use it for these data?"
            )
        return self.statistics[self.leader[path]]

    @contextmanager
    def watching(self) -> Iterator[Observer]:
        """Put hooks on all linears; remove the hooks at the end."""
        hooks = [
            module.register_forward_pre_hook(self._hook(path))
            for path, module in self.linears.items()
        ]
        try:
            yield self
        finally:
            self._last = None
            for hook in hooks:
                hook.remove()

    def _hook(self, path: str) -> Any:
        def seen(module: Linear, args: tuple[Tensor, ...]) -> None:
            self._see(path, module, args[0])

        return seen

    def _see(self, path: str, module: Linear, x: Tensor) -> None:
        if self._last is not None and self._last[1] is x and self._alike(path, self._last[0]):
            self.leader[path] = self._last[0]
            return
        self.leader[path], self._last = path, (path, x)
        rows = features(x.detach(), plan_of(module), impl=self.impl)
        self._add(self.statistics.setdefault(path, Statistics()), rows, path in self.split)

    def _alike(self, path: str, other: str) -> bool:
        """True if both transform their input the same way."""
        return plan_of(self.linears[path]) == plan_of(self.linears[other])

    def _add(self, into: Statistics, rows: Tensor, split: bool) -> None:
        for name, part in self.rows.split(rows).items():
            into.tokens[name] = into.tokens.get(name, 0) + len(part)
            counted = part[:, 1:] if split else part
            if self.wanted.limits and counted.numel():
                into.limits[name] = max(_finite_limit(counted), into.limits.get(name, 0.0))
            if self.wanted.moments:
                moments = part.float().T @ part.float()
                into.moments = moments if into.moments is None else into.moments.add_(moments)
            if self.wanted.largest and len(part):
                found = part.abs().amax(0).float()
                into.largest = found if into.largest is None else into.largest.maximum(found)
            if self.wanted.absolute:
                found = part.float().abs().sum(0)
                into.absolute = found if into.absolute is None else into.absolute.add_(found)


def _finite_limit(x: Tensor) -> float:
    """max |x|. Errors: ValueError for inf or nan."""
    limit = float(x.abs().max())
    if not math.isfinite(limit):
        raise ValueError("activations to calibrate on must be finite, got inf or nan")
    return limit
