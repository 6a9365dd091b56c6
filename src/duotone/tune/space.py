"""The search space: dimensions are data, a point is one choice per dimension.

Every point has a value for every dimension, also for dimensions without effect, so that any sampler
can mix any two points. `build.spec_of` makes a `CacheSpec` of a point, or raises ValueError for an
invalid spec, before any model work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Point = dict[str, Any]

# Shares of channels are multiples of 1/16: whole channels at every head_dim in use.
SHARES = 16
# Shares of a span's tokens that have codes of their own; 0: no background.
FOREGROUNDS = (0, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
# Score calibration pairs (tau1, tau2) of CalibQuant's grid (eq. 7-8); (0, 0) is none.
TAUS = ("none", *(f"{a},{b}" for a in range(4) for b in range(4) if a or b))
# XQuant's eta in steps that have 1/3, 1/6 and .045 among them.
ETA_STEPS = 600


@dataclass(frozen=True)
class Choice:
    """One of a few values; points may leave out `default`."""

    name: str
    values: tuple[Any, ...]
    default: Any


@dataclass(frozen=True)
class Steps:
    """low, low + step, ..., high."""

    name: str
    low: float
    high: float
    step: float
    default: float


Dimension = Choice | Steps


def _tensor(which: str, layers: int, portable: bool) -> list[Dimension]:
    """Dimensions of K's or V's quantizer.

    first, second, third: sixteenths of the channels at `top` bits, half of `top`, a quarter.
    boosted, starved: layers with about twice or half the code bits, by rank. prefix: the first
    layers, after which all have half the code bits and an eta of their own (XQuant's kq and vq).
    """
    ruled = 0 if portable else layers
    etas = ETA_STEPS // 3
    dimensions: list[Dimension] = [
        Choice("top", (1, 2, 3, 4, 8), 2),
        Steps("first", 0, SHARES, 1, SHARES),
        Steps("second", 0, SHARES, 1, 0),
        Steps("third", 0, SHARES, 1, 0),
        Choice("along", ("tokens", "channels", "span"), "tokens"),
        Choice("mapping", ("asymmetric", "symmetric", "hybrid"), "asymmetric"),
        Choice("group", (0, 32, 64, 128, 256), 0),
        Choice("levels", ("uniform", "lloyd"), "uniform"),
        Choice("fit_gain", (False, True), False),
        Steps("gain", 0.8, 1.8, 0.05, 1.0),
        Steps("energy", 0.0, 2.0, 0.25, 0.0),
        Steps("eta", 0, etas, 1, 0),
        Steps("eta_after", 0, etas, 1, 0),
        Steps("shrink", 0.3, 1.0, 0.05, 1.0),
        Choice("transform", ("none", "hadamard"), "none"),
        Steps("boosted", 0, ruled, 1, 0),
        Steps("starved", 0, ruled, 1, 0),
        Steps("prefix", layers - ruled, layers, 1, layers),
        Choice("param_dtype", ("float16", "float8"), "float16"),
    ]
    return [_named(dimension, f"{which}_{dimension.name}") for dimension in dimensions]


def _named(dimension: Dimension, name: str) -> Dimension:
    return type(dimension)(**{**asdict(dimension), "name": name})


def _visual(layers: int) -> list[Dimension]:
    return [
        Choice("policy", ("spans", "stream"), "spans"),
        Choice("ranges", ("sequence", "run"), "sequence"),
        Choice("tau", TAUS, "none"),
        Choice("foreground", FOREGROUNDS, 0),
        *(
            _named(dimension, f"{which}_back_{dimension.name}")
            for which in ("key", "value")
            for dimension in _background()
        ),
    ]


def _background() -> list[Dimension]:
    """Widths of the tokens that stand out least, where `foreground` leaves some."""
    return [
        Choice("top", (1, 2, 4), 2),
        Steps("first", 0, SHARES, 1, 2),
        Steps("second", 0, SHARES, 1, 4),
        Steps("third", 0, SHARES, 1, 0),
    ]


def _sharing(layers: int) -> list[Dimension]:
    """The first layer of K and V that shares codes in pairs; `layers`: none (XQuant sec. 3.3)."""
    return [Steps(f"{which}_share_from", 0, layers, 1, layers) for which in ("key", "value")]


def _stream() -> list[Dimension]:
    return [
        Choice("sink", (0, 8, 32, 64), 0),
        Choice("recent", (0, 16, 32, 64, 96, 128), 0),
        Choice("flush", (1, 32, 64, 128, 256), 1),
        Choice("key_norm", (False, True), False),
    ]


@dataclass(frozen=True)
class Space:
    """All dimensions of a search on one model."""

    dimensions: tuple[Dimension, ...]
    layers: int

    @property
    def defaults(self) -> Point:
        """The point that completes partial points."""
        return {dimension.name: dimension.default for dimension in self.dimensions}

    def point(self, **choices: Any) -> Point:
        """A full point. Errors: ValueError for an unknown dimension or a value outside of it."""
        unknown = sorted(set(choices) - set(self.defaults))
        if unknown:
            raise ValueError(f"the space has the dimensions {sorted(self.defaults)}; got {unknown}")
        full = {**self.defaults, **choices}
        for dimension in self.dimensions:
            if not contains(dimension, full[dimension.name]):
                raise ValueError(f"{dimension} does not contain {full[dimension.name]!r}")
        return full

    def holds(self, choices: Mapping[str, Any]) -> bool:
        """True if `point` would take these choices."""
        known = {dimension.name: dimension for dimension in self.dimensions}
        return all(name in known and contains(known[name], v) for name, v in choices.items())

    @property
    def digest(self) -> str:
        """Digest that changes with any dimension."""
        data = json.dumps([asdict(dimension) for dimension in self.dimensions])
        return hashlib.sha256(data.encode()).hexdigest()[:10]


def contains(dimension: Dimension, value: Any) -> bool:
    """True if `value` is one of the dimension's values."""
    if isinstance(dimension, Choice):
        return value in dimension.values
    steps = (value - dimension.low) / dimension.step
    return dimension.low <= value <= dimension.high + 1e-9 and abs(steps - round(steps)) < 1e-6


def space_for(layers: int, *, visual: bool, text: bool, portable: bool = False) -> Space:
    """The space for a model of `layers` layers.

    visual: prompts have pictures, so that visual spans may have a policy of their own; else all
        tokens are a stream. text: in addition to visual spans, dimensions of the text's storage.
        portable: no choice that names a layer, so that the spec fits models of any depth.
    """
    dimensions: list[Dimension] = [*_tensor("key", layers, portable)]
    dimensions += _tensor("value", layers, portable)
    dimensions += _visual(layers) if visual else []
    dimensions += _stream()
    dimensions += [Choice("text_bits", (0, 2, 4, 8), 0)] if visual and text else []
    dimensions += [] if portable else _sharing(layers)
    return Space(tuple(dimensions), layers)


def merged(*parts: Mapping[str, Any]) -> Point:
    """Merge the choices of several parts."""
    return {name: value for part in parts for name, value in part.items()}


def prefixed(which: str | Sequence[str], **choices: Any) -> Point:
    """{key_top: ...} from ("key", top=...)."""
    names = [which] if isinstance(which, str) else which
    return {f"{name}_{key}": value for name in names for key, value in choices.items()}
