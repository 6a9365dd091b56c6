"""States that wait to be stored: for a plan, for attention, or for layers stored with them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from duotone.cache import AppendPlan, LayerStore
from duotone.cache.together import can_join, changed_bytes, form_of

# New K and V of layers that wait for each other, with the stored tokens that change. It is five
# layers of an 8B model in a prompt of 3,400 tokens. Twice as many save no time there (H200).
JOINED_BYTES = 32 << 20


class Waiting(dict[int, tuple[Tensor, Tensor]]):
    """K and V of a step by layer, in the order in which the layers came."""

    def may_grow(self, stores: Sequence[LayerStore], plans: Sequence[AppendPlan | None]) -> bool:
        """True where the last layer may be stored with later ones, and all have few bytes."""
        if not self:
            return True
        index, states = next(reversed(self.items()))
        plan, store = plans[index], stores[index]
        if plan is None or plan.is_decode_step or not can_join(store):
            return False
        each = sum(x.nbytes for x in states) + changed_bytes(store, plan)
        return each * len(self) < JOINED_BYTES

    def groups(
        self, stores: Sequence[LayerStore], plans: Sequence[AppendPlan | None]
    ) -> list[list[int]]:
        """Layers whose plans are known, in one list those that are stored together."""
        found: list[tuple[object, list[int]]] = []
        for index, states in self.items():
            plan, store = plans[index], stores[index]
            if plan is None:
                continue
            # An object of its own equals no other.
            form = object()
            if can_join(store):
                shapes = [(x.shape, x.dtype, x.device) for x in states]
                form = id(plan), shapes, form_of(store, plan)
            known = next((layers for other, layers in found if other == form), None)
            if known is None:
                found.append((form, [index]))
            else:
                known.append(index)
        return [layers for _, layers in found]
