"""The policy of one modality: a quantizer of K and one of V."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from duotone.quant.spec_base import Record, of_policy, require
from duotone.quant.tensor_spec import TensorSpec


@dataclass(frozen=True)
class KVSpec(Record):
    """The quantizers of K and V for one modality."""

    NEEDED: ClassVar = (("key",), ("value",))

    key: TensorSpec = of_policy(default_factory=TensorSpec)
    value: TensorSpec = of_policy(default_factory=TensorSpec)

    def __post_init__(self) -> None:
        for name in ("key", "value"):
            spec = getattr(self, name)
            if isinstance(spec, Mapping):
                object.__setattr__(self, name, TensorSpec.from_dict(spec))
            else:
                ok = isinstance(spec, TensorSpec)
                require(ok, f"KVSpec.{name} must be a TensorSpec", spec, "Or a dict of its fields.")
        remedy = "Scores need K of whole blocks: let V lag alone."
        require(not self.key.lag, "KVSpec.key.lag must be 0", self.key.lag, remedy)
        remedy = "It corrects scores, which V has no part in."
        require(not self.value.jensen, "KVSpec.value.jensen must be False", True, remedy)

    @property
    def flush_tokens(self) -> int:
        """Tokens that leave a window at a time: whole groups of both K and V."""
        return math.lcm(*(t.block_tokens or 1 for t in (self.key, self.value)))

    @property
    def nominal_bits(self) -> float:
        """Bits of the codes alone, averaged over K and V: the papers' count."""
        return (self.key.nominal_bits + self.value.nominal_bits) / 2
