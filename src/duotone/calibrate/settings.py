"""Settings of a calibration, and the choices that all calibrations share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

import duotone
from duotone.hf.model.facts import ModelFacts
from duotone.quant import TensorSpec
from duotone.quant.our_schemes import TILE

from .transform import allocate

# Chosen on calibration samples of duotone-tiny's tasks in November 2026: with a background, and
# for spans as a whole as in the data-free preset. Their keys were chosen on five other models.
# Attention picks tokens that stand out. Lloyd's levels fall short of these where they have no part
# of their own: min/max keeps them, and a fitted gain makes scores unbiased.
KEY = TensorSpec(levels="lloyd", gain="fit", energy=1.0)
WHOLE_KEY = TensorSpec(gain="fit")
PARTED_VALUE = TensorSpec(levels="lloyd", energy=0.5)
WHOLE_VALUE = TensorSpec(levels="lloyd", energy=1.5)
# {mean bits up to here: spread of V's levels}: few levels lose the mean of tokens.
PARTED_GAINS = {1.5: 1.1}
WHOLE_GAINS = {1.5: 1.25, 2.5: 1.1}
STREAM_GAINS = {1.5: 1.1}
# Regularization of the metrics.
PARTED_FLOOR, WHOLE_FLOOR, STREAM_FLOOR = 100.0, 1.0, 10.0
# Bits of scales and zero-points: those beside which `bits` counts, and those of visual spans.
PLAIN_BITS, SMALL_BITS = 16, 8
# Factors of errors: of K and V in spans and in streams, and of a foreground's against its
# background's.
TENSOR_WEIGHTS = {"key": 0.5, "value": 1.0}
STREAM_WEIGHTS = {"key": 1.0, "value": 1.0}
FOREGROUND_WEIGHT = 4.0
# Of streams of text: code bits where nobody says how many, and tokens at the start in 16 bit.
TEXT_BITS, SINK = 2.0, 4


@dataclass(frozen=True)
class Settings:
    """Choices of a calibration.

    bits: of codes, mean over the channels and tokens of all layers' K and V. Visual spans count
    them as if parameters had 16 bits: those have 8, and what that saves goes to codes. None: as
    many true bits as `duotone@1` takes at the samples' spans; 2 code bits of a stream of text.
    regularization: of the metrics, see `klt`. None: 100 where spans have two parts, so that bases
    are all but orthogonal, 10 in streams, else 1: best on small models (docs/calibrate.md).
    foreground: share of a visual span's tokens that get codes of their own, None: no background.
    group, recent: of a stream of text, tokens that are packed together, and those at its end that
    stay in 16 bit. gain: of V's levels; None: a constant, or "fit" where spans are whole and the
    samples prefer it (`gains`).
    text: calibrate the stream of text also of a model that takes pictures, whose visual spans are
    calibrated otherwise.
    """

    bits: float | None = None
    regularization: float | None = None
    foreground: float | None = 0.45
    group: int = 64
    recent: int = 32
    gain: float | Literal["fit"] | None = None
    text: bool = False

    def check(self, head_dim: int) -> None:
        """Raise ValueError for settings that heads of this size do not allow."""
        if self.regularization is not None and not self.regularization >= 0:
            raise ValueError(f"regularization must be >= 0, got {self.regularization}")
        if self.foreground is not None and not 0 < self.foreground < 1:
            raise ValueError(
                f"foreground must lie in (0, 1) or be None (no background), got {self.foreground}"
            )
        if self.group < 1 or self.recent < 0:
            raise ValueError(
                f"group must be >= 1 and recent >= 0, got {self.group} and {self.recent}"
            )
        codes = 1.0 if self.bits is None else self.bits
        allocate({(0, "key", "visual"): torch.ones(head_dim)}, codes)

    def is_text(self, facts: ModelFacts) -> bool:
        """True where the stream of text is calibrated, False: visual spans."""
        return self.text or not facts.is_multimodal

    def group_of(self, facts: ModelFacts) -> int | None:
        """Tokens per span of the stream of text; None where visual spans are calibrated."""
        return self.group if self.is_text(facts) else None

    def code_bits(self, parts: Iterable[str]) -> float:
        """`bits` of these parts (`parts`), about 1 where a preset says how many."""
        if self.bits is not None:
            return self.bits
        return TEXT_BITS if "text" in parts else 1.0

    def floor(self, parts: Iterable[str]) -> float:
        """`regularization` for tokens in these parts (`parts`)."""
        if self.regularization is not None:
            return self.regularization
        if "text" in parts:
            return STREAM_FLOOR
        return PARTED_FLOOR if "background" in parts else WHOLE_FLOOR

    def parts(self, facts: ModelFacts) -> dict[str, float]:
        """{policy of a `CacheSpec`: its share of the tokens}."""
        if self.is_text(facts):
            return {"text": 1.0}
        if self.foreground is None:
            return {"visual": 1.0}
        return {"visual": self.foreground, "background": 1 - self.foreground}

    def division(self, facts: ModelFacts) -> dict[str, Any]:
        """Fields of a `CacheSpec` that divide spans: whole tiles of long ones, as in `duotone`."""
        if "background" not in self.parts(facts):
            return {}
        return {"foreground": self.foreground, "foreground_multiple": TILE}

    def shares(self, facts: ModelFacts, span_tokens: float) -> dict[str, float]:
        """`parts` of spans of so many tokens, of which tiles and whole tokens are taken."""
        division = self.division(facts)
        if not division:
            return self.parts(facts)
        tokens = max(1, round(span_tokens))
        preset = duotone.scheme("duotone", bits=1).replace(short_foreground=None, **division)
        front = preset.foreground_of(tokens) / tokens
        return {"visual": front, "background": 1 - front}

    def quantizer(self, which: Literal["key", "value"], parts: Iterable[str]) -> TensorSpec:
        """Quantizer of these parts (`parts`) that gets classes and a transform."""
        parts = set(parts)
        if which == "key":
            return WHOLE_KEY if parts == {"visual"} else KEY
        value, gains = WHOLE_VALUE, STREAM_GAINS if "text" in parts else WHOLE_GAINS
        if "background" in parts:
            value, gains = PARTED_VALUE, PARTED_GAINS
        if self.gain is not None:
            return value.replace(gain=self.gain)
        codes = self.code_bits(parts)
        gain = next((gain for most, gain in gains.items() if codes <= most), 1.0)
        return value.replace(gain=gain)

    def to_dict(self) -> dict[str, Any]:
        """JSON-safe fields."""
        return asdict(self)


def tensor_weights(parts: Iterable[str]) -> Mapping[str, float]:
    """Factors of the errors of K and V in these parts."""
    return STREAM_WEIGHTS if "text" in parts else TENSOR_WEIGHTS


def part_weights(parts: Iterable[str]) -> dict[str, float]:
    """Factors of the errors of these parts: the foreground's where there is a background."""
    weights = dict.fromkeys(parts, 1.0)
    return weights | {"visual": FOREGROUND_WEIGHT} if "background" in weights else weights
