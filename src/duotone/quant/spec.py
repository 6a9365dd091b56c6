"""What a scheme is: frozen, JSON-safe data with no behaviour of its own.

A quantizer of one tensor is fixed by independent choices (`TensorSpec`), a policy for one modality
by two of them (`KVSpec`), a cache by a policy per modality, its windows, and what differs from
layer to layer (`CacheSpec`). No code asks which paper a spec came from, so every combination works.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from duotone.quant.record import Record, is_count, is_number, require
from duotone.quant.tensor_spec import TensorSpec as TensorSpec


@dataclass(frozen=True)
class KVSpec(Record):
    """The quantizers of K and V for one modality."""

    key: TensorSpec = field(default_factory=TensorSpec)
    value: TensorSpec = field(default_factory=TensorSpec)

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            spec = getattr(self, name)
            if isinstance(spec, Mapping):
                object.__setattr__(self, name, TensorSpec.from_dict(spec))
            else:
                ok = isinstance(spec, TensorSpec)
                require(ok, f"KVSpec.{name} must be a TensorSpec", spec, "Or a dict of its fields.")

    @property
    def flush_tokens(self) -> int:
        """Tokens that leave a window at a time: whole groups of both K and V."""
        return math.lcm(*(t.group or 1 for t in (self.key, self.value) if t.along != "channels"))

    @property
    def nominal_bits(self) -> float:
        """Bits of the codes alone, averaged over K and V: the papers' count."""
        return (self.key.nominal_bits + self.value.nominal_bits) / 2


@dataclass(frozen=True)
class CacheSpec(Record):
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
            require(is_count(value), f"{name} must be an integer >= 0", value, "In tokens.")
        self._normalise_tau()
        ok = self.ranges in ("sequence", "run")
        require(ok, "ranges must be 'sequence' or 'run'", self.ranges, "Pick one of them.")
        remedy = "Key normalisation comes with a later version."
        require(self.key_norm is False, "key_norm must be False", self.key_norm, remedy)
        self._check_text_groups()

    def _normalise_policies(self) -> None:
        for name, words in (("visual", ("text", "dense")), ("text", ("dense",))):
            value = getattr(self, name)
            if isinstance(value, Mapping):
                object.__setattr__(self, name, KVSpec.from_dict(value))
            elif not isinstance(value, KVSpec):
                rule = f"CacheSpec.{name} must be a KVSpec or one of {words}"
                require(value in words, rule, value, "See DESIGN: a policy per modality.")

    def _normalise_tau(self) -> None:
        if self.tau is None:
            return
        ok = isinstance(self.tau, (tuple, list)) and len(self.tau) == 2
        ok = ok and all(is_number(t) and t >= 0 for t in self.tau)
        require(ok, "tau must be None or a pair of numbers >= 0", self.tau, "E.g. (0, 3).")
        object.__setattr__(self, "tau", tuple(float(t) for t in self.tau))

    def _check_text_groups(self) -> None:
        if not isinstance(self.text, KVSpec):
            return
        for name in ("key", "value"):
            spec = getattr(self.text, name)
            ok = spec.along == "channels" or spec.group is not None
            remedy = "A stream never ends, so 'the whole span' has no meaning: e.g. group=32."
            require(ok, f"text.{name} along tokens needs a group", spec.group, remedy)

    def nominal_bits(self, layers: int) -> float:
        """The papers' count: bits of the codes of what is quantized, averaged over `layers`.

        Scales, zero-points, signs and 16-bit windows are not in it: see `MemoryReport` for those.
        """
        require(is_count(layers) and layers > 0, "layers must be >= 1", layers, "Model depth.")
        policy = self.visual if isinstance(self.visual, KVSpec) else self.text
        return policy.nominal_bits if isinstance(policy, KVSpec) else 16.0
