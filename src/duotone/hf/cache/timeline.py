"""A cache's timeline: the current step, each layer's plan for it, and what is not stored yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from duotone.cache import AppendPlan, Importance, Ledger
from duotone.cache.eviction import Selection
from duotone.cache.index import LedgerState
from duotone.quant import CacheSpec
from duotone.quant.checks import Checks


@dataclass(frozen=True)
class Step:
    """One forward step as the model announced it.

    visual, real: which of its tokens are visual and which are no padding. start: logical length
    before it.
    """

    visual: Bool[Tensor, "batch tokens"]
    real: Bool[Tensor, "batch tokens"]
    start: int

    @property
    def tokens(self) -> int:
        """New tokens per sequence, padding included."""
        return self.real.shape[1]

    @property
    def end(self) -> int:
        """Logical length after it."""
        return self.start + self.tokens


class Steps:
    """Ledgers and plans of all layers: one that all of them share, or one each where they evict.

    order: of this step's queries, where it is another than that of its tokens (AIFS).
    selection: chooses what an evicted prompt keeps while it runs; None at any other time. Its plans
    follow from scores, so they come after the layer has attended, or after the last one has.
    """

    def __init__(self, spec: CacheSpec, depth: int) -> None:
        self.spec, self.depth = spec, depth
        self.ledgers: list[Ledger] = []
        self.plans: list[AppendPlan | None] = [None] * depth
        self.step: Step | None = None
        self.order: Tensor | None = None
        self.selection: Selection | None = None
        # Of states that are stored already, to be made before the step ends.
        self.checks = Checks()
        self._taken: set[int] = set()
        self._waiting: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """Logical length after the last whole step."""
        return self.ledgers[0].state.seen if self.ledgers else 0

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first step."""
        return len(self.ledgers[0].state.dense.lengths) if self.ledgers else 0

    @property
    def is_decode_step(self) -> bool:
        """One token that every sequence keeps in 16 bit: it is attended from the store."""
        return self.plans[0] is not None and self.plans[0].is_decode_step

    def begin(self, visual: Tensor, real: Tensor) -> None:
        """Start a step; plans are made now, unless its tokens are evicted."""
        batch = len(real)
        if not self.ledgers:
            self._open(batch, real.device)
        elif self.batch != batch:
            raise ValueError(
                f"this cache holds {self.batch} sequences; got a batch "
                f"of {batch}. Use a cache per batch, or batch_repeat_interleave."
            )
        self.step, self._taken = Step(visual, real, self.length), set()
        self.selection, self.plans, self.order = None, [None] * self.depth, None
        if self.spec.evict is not None and self.step.start == 0 and self.step.tokens > 1:
            self.selection = Selection(self.spec.evict, self.depth, visual, real)
            return
        made = {id(ledger): ledger.plan(visual, real) for ledger in self._distinct()}
        self.plans = [made[id(ledger)] for ledger in self.ledgers]

    def _open(self, batch: int, device: torch.device) -> None:
        count = 1 if self.spec.evict is None else self.depth
        self.restore([Ledger(self.spec, batch, device) for _ in range(count)])

    def restore(self, ledgers: list[Ledger]) -> None:
        """Go on with these ledgers: one per layer, or one for all."""
        self.ledgers = ledgers if len(ledgers) == self.depth else ledgers * self.depth

    def _distinct(self) -> list[Ledger]:
        return list({id(ledger): ledger for ledger in self.ledgers}.values())

    def take(self, index: int, key: Tensor, value: Tensor) -> None:
        """Hold one layer's states of the current step until its plan is known."""
        if self.step is None or index in self._taken:
            raise RuntimeError(
                f"layer {index} was updated outside a step that the cache has heard of. Pass the "
                "cache as `past_key_values` to the model that it was made for, not to a copy, a "
                "wrapper or an inner module. A cache of duotone.enable ends with its block: to go "
                "on afterwards, make a QuantizedCache."
            )
        if key.shape[2] != self.step.tokens:
            raise ValueError(
                f"a step of {self.step.tokens} tokens must give each of them one K and V; layer "
                f"{index} got {key.shape[2]}. A model that puts a picture's tokens beside its ids "
                "cannot have a quantized cache: use the model's own."
            )
        self._taken.add(index)
        self._waiting[index] = (key, value)

    def judge(self, found: Importance) -> None:
        """Hear how important one layer finds the tokens of an evicted prompt."""
        for kept in self.selection.hear(found):
            index = sum(plan is not None for plan in self.plans)
            self.plans[index] = self.ledgers[index].plan(self.step.visual, self.step.real, kept)
        if None not in self.plans:
            self.selection = None

    def due(self) -> list[int]:
        """Layers whose states wait and whose plan is known."""
        return [index for index in self._waiting if self.plans[index] is not None]

    def release(self, index: int) -> tuple[AppendPlan, Tensor, Tensor]:
        """Hand over a layer's plan and states (K, V), and let go of them."""
        key, value = self._waiting.pop(index)
        return self.plans[index], key.detach(), value.detach()

    def is_stored(self, index: int) -> bool:
        """This step's states of a layer are in its store already."""
        return index not in self._waiting

    def state(self, index: int, before: bool = False) -> LedgerState:
        """Places of a layer's tokens, now or before this step."""
        plan = self.plans[index]
        if plan is None:
            return self.ledgers[index].state
        return plan.before if before else plan.after

    def seen(self, index: int) -> int:
        """Logical length of one layer: the current step counts once the layer has taken it."""
        if self.step is None:
            return self.length
        return self.step.end if index in self._taken else self.step.start

    @property
    def is_complete(self) -> bool:
        """The current step has reached all layers."""
        return len(self._taken) == self.depth

    def settle(self) -> None:
        """Make the checks that were put off. Errors: ValueError; the step has then broken off."""
        try:
            self.checks.settle()
        except ValueError:
            self._taken.clear()
            raise

    def let_go(self) -> None:
        """Drop states that still wait: they belong to a step that broke off, which has to show."""
        self._taken -= set(self._waiting)
        self._waiting.clear()

    def finish(self) -> None:
        """End a step that is stored: of it, nothing but where its tokens are is kept."""
        self._taken.clear()
        self._forget_step()

    def check_whole(self) -> None:
        """Raise where the last step broke off."""
        stored = len(self._taken) - len(self._waiting)
        if self.step is not None and stored != self.depth:
            raise RuntimeError(
                f"the last step reached {stored} of {self.depth} layers, so the "
                "cache is not consistent any more. Start again with a new cache."
            )

    def crop(self, end: int) -> None:
        """Forget tokens at logical indices >= end."""
        for ledger in self._distinct():
            ledger.crop(end)
        self._forget_step()

    def rows(self, index: Tensor) -> None:
        """Pick sequences."""
        for ledger in self._distinct():
            ledger.rows(index)
        self._forget_step()

    def _forget_step(self) -> None:
        self.step = self.selection = self.order = None
        self.plans = [None] * self.depth
