"""Runs of layers that store the weighted average of their codes (XQuant sec. 3.3.3)."""

from __future__ import annotations

from dataclasses import dataclass

from duotone.cache.packed import Codes, PackedTensor
from duotone.quant import average_codes, pack, unpack


@dataclass(frozen=True)
class RunMember:
    """One layer's part in a run whose codes of K or V are averaged.

    The average is known once the run's last layer has packed its tokens. Until then, within one
    step, packed codes of the other layers wait in a dictionary that the members share.

    weights: of all layers of the run. place: number of this layer in the run. waiting: codes by
    store and by place.
    """

    weights: tuple[float, ...]
    place: int
    waiting: dict[str, dict[int, Codes]]

    def add(self, store: str, tensor: PackedTensor) -> Codes | None:
        """Add this layer's codes of one step; return the run's, packed, if the layer is the last.

        store: "visual" or "stream": a step may bring tokens to both.
        """
        waiting = self.waiting.setdefault(store, {})
        waiting[self.place] = tensor.codes
        if len(waiting) < len(self.weights):
            return None
        del self.waiting[store]
        bits = tensor.spec.bits
        codes = [unpack(waiting[i], bits, tensor.head_dim) for i in range(len(self.weights))]
        return pack(average_codes(codes, self.weights), bits)


def run_members(weights: tuple[float, ...]) -> list[RunMember]:
    """Make the members of one run, in the order of its layers."""
    waiting: dict[str, dict[int, Codes]] = {}
    return [RunMember(weights, place, waiting) for place in range(len(weights))]
