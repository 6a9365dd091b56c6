"""What a scheme is: frozen, JSON-safe data with no behaviour of its own.

A quantizer of one tensor is fixed by five independent choices (`TensorSpec`), a policy for one
modality by two of them (`KVSpec`), a cache by a policy per modality and its windows (`CacheSpec`).
No code asks which paper a spec came from, so every combination of the choices works.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from dataclasses import replace as dataclass_replace
from typing import Any, Literal, TypeVar

BITS = (1, 2, 4, 8)

R = TypeVar("R", bound="_Record")


def _require(condition: bool, rule: str, got: object, remedy: str) -> None:
    if not condition:
        raise ValueError(f"{rule}; got {got!r}. {remedy}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class _Record:
    """`replace`, `to_dict` and the checks of unknown fields, shared by the three spec classes."""

    def replace(self: R, **changes: Any) -> R:
        """Return a copy with `changes`; unknown fields and bad values raise ValueError."""
        _check_names(type(self), changes)
        return dataclass_replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-safe data; `from_dict` is the exact inverse."""
        return asdict(self)  # type: ignore[call-overload]

    def to_json(self) -> str:
        """Return `to_dict()` as a JSON string."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls: type[R], text: str) -> R:
        """Inverse of `to_json`."""
        return cls.from_dict(json.loads(text))

    @classmethod
    def from_dict(cls: type[R], data: Mapping[str, Any]) -> R:
        """Inverse of `to_dict`; unknown fields raise ValueError."""
        _check_names(cls, data)
        return cls(**data)


def _check_names(cls: type, given: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(cls)]
    unknown = sorted(set(given) - set(known))
    _require(not unknown, f"{cls.__name__} has the fields {known}", unknown, "Check the spelling.")


@dataclass(frozen=True)
class TensorSpec(_Record):
    """How one tensor x [..., tokens, channels] becomes codes, `x_hat = codes * scale + zero_point`.

    bits: width of a code (1, 2, 4, 8). A symmetric group stores a sign bit beside it.
    along: the axis whose elements share one scale: "tokens" (a scale per channel), "channels"
        (a scale per token), or "span" (one scale for all of a group's tokens and channels:
        the "global" row of CalibQuant's Table 4).
    group: elements of that axis per scale; None is the whole span (or the whole head_dim).
    mapping: "asymmetric" (zero_point = minimum), "symmetric" (sign and magnitude, InnerQ eq. 12),
        or "hybrid" (per group the one with the lower sum of absolute errors, InnerQ sec. 4.2).
    shrink: end points times this before quantizing, about zero (CalibQuant's released code).
    eta: end points moved inwards after quantizing; codes do not change (XQuant eq. 12).
    levels: "uniform" (end points at min and max) or "lloyd" (end points that minimise the squared
        error of the group; at 1 bit the two conditional means).
    gain: levels scaled about the group's mean, `x_hat <- mean + gain * (x_hat - mean)`. A number,
        or "fit": one gain per block from the block's own covariances (`ranges.fitted_gain`).
    classes: channels of unequal bits, or None. ((4, 1/8), (2, 1/4)): in every block the eighth of
        the channels with the largest variance gets 4 bits, the next quarter 2, the others only
        their mean. Reverse water-filling on the block's own variances, with the counts fixed so
        that a kernel knows the layout; replaces `bits`. Along tokens, asymmetric.
    energy: tokens count by this power of their energy about the block's mean, in the variances that
        order the channels and in a last least-squares fit of each channel's levels about the mean
        (before `gain`). Attention picks tokens that stand out; 0 lets all count alike and fits
        nothing. Along tokens, asymmetric.
    read_power: the variances that order the channels are multiplied by the power with which the
        model reads each channel (K: W_q, V: W_o), where the cache knows it.
    transform: None; bases before quantization are not part of this version.
    param_dtype: how scale and zero_point are stored.
    """

    bits: int = 1
    along: Literal["tokens", "channels", "span"] = "tokens"
    group: int | None = None
    mapping: Literal["asymmetric", "symmetric", "hybrid"] = "asymmetric"
    eta: float = 0.0
    shrink: float = 1.0
    levels: Literal["uniform", "lloyd"] = "uniform"
    gain: float | Literal["fit"] = 1.0
    classes: tuple[tuple[int, float], ...] | None = None
    energy: float = 0.0
    read_power: bool = False
    transform: str | None = None
    param_dtype: Literal["float16", "bfloat16", "float32"] = "float16"

    def __post_init__(self) -> None:
        _require(self.bits in BITS, f"bits must be one of {BITS}", self.bits, "Pick one of them.")
        self._check_choice("along", ("tokens", "channels", "span"))
        self._check_choice("mapping", ("asymmetric", "symmetric", "hybrid"))
        self._check_choice("levels", ("uniform", "lloyd"))
        self._check_choice("param_dtype", ("float16", "bfloat16", "float32"))
        ok = self.group is None or (_is_count(self.group) and self.group > 0)
        _require(ok, "group must be a positive integer or None", self.group, "None: whole span.")
        ok = _is_number(self.eta) and 0 <= self.eta < 0.5
        _require(ok, "eta must lie in [0, 0.5)", self.eta, "At 0.5 all levels would meet.")
        ok = _is_number(self.shrink) and 0 < self.shrink <= 1
        _require(ok, "shrink must lie in (0, 1]", self.shrink, "1.0 switches it off.")
        self._check_gain()
        self._check_classes()
        self._check_energy()
        remedy = "Bases before quantization come with a later version."
        _require(self.transform is None, "transform must be None", self.transform, remedy)

    def _check_gain(self) -> None:
        fit = self.gain == "fit"
        ok = fit or (_is_number(self.gain) and self.gain > 0)
        _require(ok, "gain must be positive or 'fit'", self.gain, "1.0 switches it off.")
        ok = self.gain == 1 or self.mapping == "asymmetric"
        remedy = "Symmetric levels have no zero_point to hold the mean: use mapping='asymmetric'."
        _require(ok, "gain != 1 needs mapping='asymmetric'", self.mapping, remedy)
        remedy = "Along channels or the span a block has no covariance between channels."
        _require(
            not fit or self.along == "tokens", "gain='fit' needs along='tokens'", self.along, remedy
        )

    def _check_classes(self) -> None:
        if self.classes is None:
            return
        pairs = tuple((bits, share) for bits, share in self.classes)
        widths = [bits for bits, _ in pairs]
        ok = 1 <= len(pairs) <= 3 and all(b in BITS for b in widths)
        ok = ok and widths == sorted(set(widths), reverse=True)
        rule = f"classes must be 1 to 3 pairs (bits, share) with bits falling, out of {BITS}"
        _require(ok, rule, self.classes, "E.g. ((4, 1/8), (2, 1/4)).")
        ok = all(_is_number(share) and share > 0 for _, share in pairs)
        ok = ok and sum(share for _, share in pairs) <= 1
        remedy = "What is left over gets 0 bits: its mean."
        _require(ok, "shares of classes must be positive and sum to at most 1", pairs, remedy)
        ok = self.along == "tokens" and self.mapping == "asymmetric"
        remedy = "Variances are taken along tokens and 0 bits need a zero_point."
        _require(ok, "classes need along='tokens', mapping='asymmetric'", self.along, remedy)
        object.__setattr__(self, "classes", pairs)

    def _check_energy(self) -> None:
        ok = _is_number(self.energy) and 0 <= self.energy <= 2
        _require(ok, "energy must lie in [0, 2]", self.energy, "0 switches it off.")
        ok = not self.energy or (self.along == "tokens" and self.mapping == "asymmetric")
        remedy = "Tokens are weighed against each other in the statistics along tokens."
        _require(ok, "energy needs along='tokens', mapping='asymmetric'", self.along, remedy)
        ok = not self.read_power or self.classes is not None
        remedy = "It orders the channels into classes and does nothing else."
        _require(ok, "read_power needs classes", self.read_power, remedy)

    @property
    def nominal_bits(self) -> float:
        """Bits of the codes alone, averaged over channels."""
        return sum(bits * share for bits, share in self.classes) if self.classes else self.bits

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        _require(value in choices, f"{name} must be one of {choices}", value, "Pick one of them.")


@dataclass(frozen=True)
class KVSpec(_Record):
    """The quantizers of K and V for one modality."""

    key: TensorSpec = TensorSpec()
    value: TensorSpec = TensorSpec()

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            spec = getattr(self, name)
            if isinstance(spec, Mapping):
                object.__setattr__(self, name, TensorSpec.from_dict(spec))
            else:
                ok = isinstance(spec, TensorSpec)
                _require(
                    ok, f"KVSpec.{name} must be a TensorSpec", spec, "Or a dict of its fields."
                )

    @property
    def flush_tokens(self) -> int:
        """Tokens that leave a window at a time: whole groups of both K and V."""
        return math.lcm(*(t.group or 1 for t in (self.key, self.value) if t.along != "channels"))

    @property
    def nominal_bits(self) -> float:
        """Bits of the codes alone, averaged over K and V: the papers' count."""
        return (self.key.nominal_bits + self.value.nominal_bits) / 2


@dataclass(frozen=True)
class CacheSpec(_Record):
    """A policy per modality in one cache.

    visual: KVSpec (each visual span is quantized once, whole, at prefill), "text" (visual tokens
        join the text stream) or "dense" (16 bit).
    text: KVSpec (a stream that leaves the window in whole groups) or "dense".
    sink, recent: tokens of the stream kept in 16 bit, the first ones and the last ones. The window
        is never shorter than `recent` once that many tokens exist; it floats up to one flush more.
    tau: (tau1, tau2) of the score calibration on visual scores (CalibQuant eq. 7-8), or None.
    ranges: what shares one range: "sequence" (all visual tokens of a sequence, the paper) or "run"
        (each contiguous run of visual tokens: an image, a frame).
    key_norm: per-channel key normalisation; not part of this version.
    """

    visual: KVSpec | Literal["text", "dense"] = KVSpec()
    text: KVSpec | Literal["dense"] = "dense"
    sink: int = 0
    recent: int = 0
    tau: tuple[float, float] | None = None
    ranges: Literal["sequence", "run"] = "sequence"
    key_norm: bool = False

    def __post_init__(self) -> None:
        self._normalise_policies()
        for name in ("sink", "recent"):
            value = getattr(self, name)
            _require(_is_count(value), f"{name} must be an integer >= 0", value, "In tokens.")
        self._normalise_tau()
        ok = self.ranges in ("sequence", "run")
        _require(ok, "ranges must be 'sequence' or 'run'", self.ranges, "Pick one of them.")
        remedy = "Key normalisation comes with a later version."
        _require(self.key_norm is False, "key_norm must be False", self.key_norm, remedy)
        self._check_text_groups()

    def _normalise_policies(self) -> None:
        for name, words in (("visual", ("text", "dense")), ("text", ("dense",))):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, KVSpec.from_dict(value))
            elif not isinstance(value, KVSpec):
                rule = f"CacheSpec.{name} must be a KVSpec or one of {words}"
                _require(value in words, rule, value, "See DESIGN: a policy per modality.")

    def _normalise_tau(self) -> None:
        if self.tau is None:
            return
        ok = isinstance(self.tau, (tuple, list)) and len(self.tau) == 2
        ok = ok and all(_is_number(t) and t >= 0 for t in self.tau)
        _require(ok, "tau must be None or a pair of numbers >= 0", self.tau, "E.g. (0, 3).")
        object.__setattr__(self, "tau", tuple(float(t) for t in self.tau))

    def _check_text_groups(self) -> None:
        if not isinstance(self.text, KVSpec):
            return
        for name in ("key", "value"):
            spec = getattr(self.text, name)
            ok = spec.along == "channels" or spec.group is not None
            remedy = "A stream never ends, so 'the whole span' has no meaning: e.g. group=32."
            _require(ok, f"text.{name} along tokens needs a group", spec.group, remedy)

    def nominal_bits(self, layers: int) -> float:
        """The papers' count: bits of the codes of what is quantized, averaged over `layers`.

        Scales, zero-points, signs and 16-bit windows are not in it: see `MemoryReport` for those.
        """
        _require(_is_count(layers) and layers > 0, "layers must be >= 1", layers, "Model depth.")
        policy = self.visual if isinstance(self.visual, KVSpec) else self.text
        return policy.nominal_bits if isinstance(policy, KVSpec) else 16.0
