"""A cache's timeline: its tokens, the current step, and each layer's plan for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool
from torch import Tensor

from duotone.attention import Plan
from duotone.attention.static import StaticDecoder
from duotone.cache import AppendPlan, Importance, LayerStore, Ledger, Segment, Visibility
from duotone.cache.eviction import Selection
from duotone.cache.index import LedgerState
from duotone.cache.shared_values import SharedValues
from duotone.cache.sharing import share_layers
from duotone.cache.together import applied_together
from duotone.hf.cache.frozen import Frozen, check_freezes, frozen_stores
from duotone.hf.cache.own_layers import OwnLayers
from duotone.hf.cache.scales import KeyScales
from duotone.hf.cache.waiting import Waiting
from duotone.hf.model.facts import ModelFacts
from duotone.quant import CacheSpec
from duotone.quant.checks import Checks, put_off
from duotone.tools.slow_paths import SlowPaths


@dataclass(frozen=True)
class Step:
    """One forward step as the model announced it.

    visual, real: which of its tokens are visual and which are no padding. start: logical length
    before it. decodes: True for one token that every sequence keeps in 16 bit; attention reads it
    from the store. seen: the last masks that the model gave layers, each with its `Visibility`.
    """

    visual: Bool[Tensor, "batch tokens"]
    real: Bool[Tensor, "batch tokens"]
    start: int
    decodes: bool = False
    seen: list[tuple[Tensor | None, Visibility]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """New tokens per sequence, padding included."""
        return self.real.shape[1]


class Timeline:
    """Owner of a cache's tokens: spec, ledgers, plans, waiting states, and stores.

    plans: how the attention of each layer reads. impl: the decode attention that was asked for.
    slow: warnings of slow paths that the model has given. scales: of keys in the stores.
    own: layers that keep a state instead of tokens, or a window, which the model changes by itself.
    stores, ledgers, and the step's plans: one per layer with tokens. Layers have one ledger
    together, or one each where they evict; there is none before the first step.
    frozen: the tokens in fixed buffers, while every step brings one per sequence. count: its length
    on the device, while a model runs that may be captured.
    step: the current one. order: of its queries, where it is another than that of its tokens
    (AIFS). selection: chooses what an evicted prompt keeps while it runs; None at any other time.
    Its plans follow from scores, so they come after the layer has attended, or after the last one.
    """

    def __init__(
        self,
        spec: CacheSpec,
        facts: ModelFacts,
        plans: Sequence[Plan],
        impl: str,
        slow: SlowPaths,
        scales: KeyScales,
    ) -> None:
        self.spec, self.facts, self.impl, self.slow = spec, facts, impl, slow
        self.scales = scales
        self.layouts = tuple(plan.layouts for plan in plans)
        self.own = OwnLayers(facts)
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.stores = [
            LayerStore(self.spec.at_layer(index), layouts)
            for index, layouts in enumerate(self.layouts)
        ]
        share_layers(self.stores, self.spec)
        self.own.reset()
        self.ledgers: list[Ledger] = []
        self.frozen: Frozen | None = None
        self.count: Tensor | None = None
        # Of states that are stored already, to be made before the step ends.
        self.checks = Checks()
        self.shared_values = SharedValues(self.spec, len(self.stores))
        self._taken: set[int] = set()
        self._waiting = Waiting()
        self._forget_step()

    def _forget_step(self) -> None:
        self.step: Step | None = None
        self.selection: Selection | None = None
        self.order: Tensor | None = None
        self.plans: list[AppendPlan | None] = [None] * len(self.stores)

    @property
    def length(self) -> int:
        """Logical length after the last whole step, padding included."""
        if self.frozen is not None:
            return self.frozen.length
        return self.ledgers[0].state.seen if self.ledgers else 0

    @property
    def batch(self) -> int:
        """Sequences; 0 before the first step."""
        return len(self.ledgers[0].state.dense.lengths) if self.ledgers else 0

    def is_begun(self, index: int) -> bool:
        """True once a layer has tokens, or had some."""
        return index in self._waiting or self.stores[index].dtype is not None

    def begin(self, visual: Tensor, real: Tensor) -> None:
        """Begin a step of these tokens, [batch, tokens] True at visual ones and at no padding.

        Plans are made now, unless its tokens are evicted.
        """
        batch = len(real)
        if not self.ledgers:
            count = 1 if self.spec.evict is None else len(self.stores)
            self.restore([Ledger(self.spec, batch, real.device) for _ in range(count)])
        elif self.batch != batch:
            raise ValueError(
                f"this cache holds {self.batch} sequences; got a batch "
                f"of {batch}. Use a cache per batch, or batch_repeat_interleave."
            )
        start, tokens = self.length, real.shape[1]
        self.own.check_length(start)
        self._forget_step()
        self._taken = set()
        if self.spec.evict is not None and start == 0 and tokens > 1:
            self.step = Step(visual, real, start)
            self.selection = Selection(self.spec.evict, len(self.stores), visual, real)
            return
        made = {id(ledger): ledger.plan(visual, real) for ledger in self._distinct()}
        self.plans = [made[id(ledger)] for ledger in self.ledgers]
        self.step = Step(visual, real, start, self.plans[0].is_decode_step)
        with put_off(self.checks):
            for store, plan in zip(self.stores, self.plans, strict=True):
                # All at once: a layer may read codes that a later one keeps, or has a part in.
                if plan.flush_first is not None:
                    store.flush(plan.flush_first)

    def restore(self, ledgers: list[Ledger]) -> None:
        """Go on with these ledgers: one per layer, or one for all."""
        count = len(self.stores)
        self.ledgers = ledgers if len(ledgers) == count else ledgers * count

    def _distinct(self) -> list[Ledger]:
        return list({id(ledger): ledger for ledger in self.ledgers}.values())

    def take(self, index: int, key: Tensor, value: Tensor) -> int:
        """Take one layer's states of the current step; returns its logical length with them.

        They are stored at once where attention reads them from the store. They wait where it also
        reads the tokens before them, and where no plan is known. Else they wait for layers that are
        stored with them.
        """
        if self._waiting and self.step.start:  # of a layer whose attention was not ours
            self.commit_due()
        if self.step is None or index in self._taken:
            raise RuntimeError(
                f"layer {index} was updated outside a step that the cache has heard of. Pass the "
                "cache to the model that it was made for, not to a copy, a "
                "wrapper or an inner module. A cache of duotone.enable ends with its block: to go "
                "on afterwards, make a QuantizedCache."
            )
        if key.shape[2] != self.step.tokens:
            raise ValueError(
                f"a step of {self.step.tokens} tokens must give each of them one K and V; layer "
                f"{index} got {key.shape[2]}. A model that puts a picture's tokens beside its ids "
                "cannot have a quantized cache: use the model's own."
            )
        shape = self.facts.shapes[index]
        if shape.latent_rope and value.shape[1:] != (1, self.step.tokens, shape.latent_rope):
            raise NotImplementedError(
                f"a latent cache takes a latent and {shape.latent_rope} channels per token; layer "
                f"{index} got V of shape {tuple(value.shape)}, as some versions of transformers "
                "expand latents before they cache them. Use the model's own cache."
            )
        self._taken.add(index)
        self._waiting[index] = (key, value)
        self.shared_values.take(index, value)
        if self.step.decodes or self.step.start == 0:
            self.commit_due()
        return self.step.start + self.step.tokens

    def commit(self) -> None:
        """Quantize and store the states whose plans are known; their dense copies are released."""
        with put_off(self.checks):
            for layers in self._waiting.groups(self.stores, self.plans):
                self._store(layers)

    def commit_due(self) -> None:
        """Commit, unless what waits may wait for later layers."""
        if not self._waiting.may_grow(self.stores, self.plans):
            self.commit()

    def _store(self, layers: list[int]) -> None:
        """Quantize the states of layers that are stored together, or those of one."""
        plan, stores = self.plans[layers[0]], [self.stores[index] for index in layers]
        waiting = [self._waiting.pop(index) for index in layers]
        keys, values = ([x.detach() for x in each] for each in zip(*waiting, strict=True))
        keys = list(map(self.scales.of_store, layers, keys))
        for index, store in zip(layers, applied_together(stores, plan, keys, values), strict=True):
            self.stores[index] = store

    def judge(self, found: Importance) -> None:
        """Hear how important one layer finds the tokens of an evicted prompt, and store them."""
        for kept in self.selection.hear(found):
            index = sum(plan is not None for plan in self.plans)
            self.plans[index] = self.ledgers[index].plan(self.step.visual, self.step.real, kept)
        if None not in self.plans:
            self.selection = None
        self.commit()

    def segments(
        self, index: int, before: bool = False, seen: Visibility | None = None
    ) -> list[Segment]:
        """The stored tokens of a layer, as they are or as they were before this step."""
        self.thaw()
        with put_off(self.checks):
            return self.stores[index].segments(self.state(index, before), seen)

    def state(self, index: int, before: bool = False) -> LedgerState:
        """Places of a layer's tokens, now or before this step."""
        plan = self.plans[index]
        if plan is None:
            return self.ledgers[index].state
        return plan.before if before else plan.after

    def seen(self, index: int) -> int:
        """Logical length of one layer: the current step counts once the layer has taken it."""
        if self.step is None or index not in self._taken:
            return self.length if self.step is None else self.step.start
        return self.step.start + self.step.tokens

    def own_from(self, index: int) -> int | None:
        """First token that attention reads from a layer's own states; None: all are in the store.

        A prompt attends in full precision, although it is stored.
        """
        is_whole = index in self._taken and self.step.start == 0 and not self.step.decodes
        return self.step.start if is_whole or index in self._waiting else None

    def end(self, is_whole: bool = True) -> None:
        """End a step, also one that broke off: nothing temporary outlives it.

        is_whole: False where the model's forward pass raised. Then its own layers may have missed
        the tokens.

        A step that reached all layers is stored, and checks that were put off are made. Of another
        one, which makes the cache unusable, the states and codes that wait for later layers are
        let go. Errors: ValueError for numbers that cannot be quantized.
        """
        try:
            if len(self._taken) == len(self.stores) and (is_whole or not self.own):
                self._store_all()
                if self.own and (torch.is_grad_enabled() or self._is_prompt):
                    self.own.release()
                self._finish()
        finally:
            # A step that broke off has to show.
            self._taken -= set(self._waiting)
            self._waiting.clear()
            for store in self.stores:
                for member in store.runs.values():
                    member.waiting.clear()

    @property
    def _is_prompt(self) -> bool:
        """The current step is the first one, or brings several tokens."""
        return self.step is not None and (self.step.start == 0 or self.step.tokens > 1)

    def settle(self) -> None:
        """Make the tokens whole and let them grow again, before anything else is asked of them.

        Errors: ValueError for numbers that cannot be quantized, RuntimeError after a step that
        broke off.
        """
        self.thaw()
        self._store_all()
        stored = len(self._taken) - len(self._waiting)
        # Only its end tells that its own layers were reached; an interrupt passes over that.
        if self.step is not None and (self.own or stored != len(self.stores)):
            raise RuntimeError(
                "the last step broke off or left layers out: it reached "
                f"{stored} of {len(self.stores)} layers with K and V, so the cache is not "
                "consistent any more. Start again with a new cache."
            )
        self._finish()

    def _store_all(self) -> None:
        """Store what waits, and make the checks that were put off."""
        self.commit()
        try:
            self.checks.settle()
        except ValueError:
            self._taken.clear()
            raise
        self.shared_values.warn()

    def _finish(self) -> None:
        """Keep nothing of a step that is whole but where its tokens are."""
        self._taken.clear()
        self._forget_step()

    def crop(self, end: int) -> None:
        """Forget tokens at logical indices >= end.

        Errors: NotImplementedError, before anything is changed, where layers keep states or windows
        that do not go back.
        """
        self.own.check_crop(self.length - end)
        self.own.crop(self.length - end)
        before = [ledger.state for ledger in self.ledgers]
        for ledger in self._distinct():
            ledger.crop(end)
        for store, ledger, old in zip(self.stores, self.ledgers, before, strict=True):
            store.truncate(ledger.state, old)

    def rows(self, index: Tensor) -> None:
        """Pick sequences."""
        for ledger in self._distinct():
            ledger.rows(index)
        for store in self.stores:
            store.rows(index)
        self.own.rows(index)

    def hold_still(self, room: int) -> Frozen:
        """Freeze in place: fixed buffers with room for `room` steps of one token per sequence.

        Errors: ValueError, before anything is changed, where fixed buffers cannot hold the tokens.
        """
        self.settle()
        check_freezes(self.length, self.spec, self.facts)
        self.own.check_freezes()
        states = [ledger.state for ledger in self.ledgers]
        stored = states[0].stored() if self.own.windows else None
        stores, orders = frozen_stores(self.stores, states, self.spec, room)
        decoder = StaticDecoder(stores, self.spec.tau, self.impl, self.slow)
        held = self.own.hold_still(stored)
        self.frozen = Frozen(decoder, orders, self.length, room, held, self.scales.copied())
        return self.frozen

    def thaw(self) -> None:
        """Go on with buffers that grow; nothing where they do already."""
        if self.frozen is not None:
            # After a step that broke off it raises, now and whenever the cache is asked again.
            self.frozen.thaw(self.stores, self.ledgers)
            self.own.thaw(self.frozen.length)
            self.frozen = None
