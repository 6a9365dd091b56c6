"""Settings of a calibration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from duotone.quant import TensorSpec

from .transform import WIDTHS, allocate

# Chosen on calibration samples of duotone-tiny's tasks in November 2026: with a background, and
# for spans as a whole as in the data-free preset.
KEY = TensorSpec(levels="lloyd", gain="fit", energy=1.0)
PARTED_VALUE = TensorSpec(levels="lloyd", energy=0.5)
WHOLE_VALUE = TensorSpec(levels="lloyd", energy=1.5)
# {mean bits up to here: spread of V's levels}: few levels lose the mean of tokens.
PARTED_GAINS = {1.5: 1.1}
WHOLE_GAINS = {1.5: 1.25, 2.5: 1.1}


@dataclass(frozen=True)
class Settings:
    """Choices of a calibration.

    bits: mean over the channels and tokens of all layers' K and V; widths, unit: see `allocate`.
    regularization, mix: of the metrics, see `klt`. The default is best where a model is used on
    other data than the calibration data; on the same data, 0.1 is better (docs/calibrate.md).
    key_weight: factor of K's errors against V's. foreground: share of a visual span's tokens
    that get codes of their own, None: no background; foreground_weight: factor of their errors.
    key, value: quantizers that get classes and a transform, None: ours. group: tokens of a text
    stream's span.
    """

    bits: float = 1.0
    widths: tuple[int, ...] = WIDTHS
    unit: int | None = None
    regularization: float = 1.0
    mix: float = 0.0
    key_weight: float = 0.5
    foreground: float | None = 0.45
    foreground_weight: float = 8.0
    key: TensorSpec | None = None
    value: TensorSpec | None = None
    group: int = 128

    def check(self, head_dim: int) -> None:
        """Raise ValueError for settings that heads of this size do not allow."""
        weights = ("regularization", "mix", "key_weight", "foreground_weight")
        for name in weights:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be >= 0, got {getattr(self, name)}")
        if not self.mix <= 1:
            raise ValueError(f"mix must lie in [0, 1], got {self.mix}")
        if self.foreground is not None and not 0 < self.foreground < 1:
            raise ValueError(
                f"foreground must lie in (0, 1) or be None (no background), got {self.foreground}"
            )
        allocate({(0, "key", "visual"): torch.ones(head_dim)}, self.bits, self.widths, self.unit)

    def parts(self, multimodal: bool) -> dict[str, float]:
        """{policy of a `CacheSpec`: its share of the tokens}."""
        if not multimodal:
            return {"text": 1.0}
        if self.foreground is None:
            return {"visual": 1.0}
        return {"visual": self.foreground, "background": 1 - self.foreground}

    @property
    def tensor_weights(self) -> dict[str, float]:
        """Factors of the errors of K and V."""
        return {"key": self.key_weight, "value": 1.0}

    def part_weights(self, parts: Iterable[str]) -> dict[str, float]:
        """Factors of the errors of these parts: the foreground's where there is a background."""
        weights = dict.fromkeys(parts, 1.0)
        return weights | {"visual": self.foreground_weight} if "background" in weights else weights

    def of_sums(self) -> dict[str, Any]:
        """The fields that decide the sums of both passes; other fields only divide the bits."""
        names = ("regularization", "mix", "foreground", "group")
        return {name: getattr(self, name) for name in names}

    def quantizer(self, which: Literal["key", "value"], parted: bool) -> TensorSpec:
        """Quantizer that gets classes and a transform. parted: spans have a background."""
        given = getattr(self, which)
        if given is not None:
            return given
        if which == "key":
            return KEY
        value, gains = (PARTED_VALUE, PARTED_GAINS) if parted else (WHOLE_VALUE, WHOLE_GAINS)
        gain = next((gain for most, gain in gains.items() if self.bits <= most), 1.0)
        return value.replace(gain=gain)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe fields."""
        return asdict(self)
