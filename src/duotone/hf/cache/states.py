"""States that `update()` of a layer returns in the place of K and V.

Our attention function reads `.timeline`, `.index`, and `.new`. States of a growing cache are
tensors with the logical shape of K or V and no storage. Any other operation dequantizes them, so a
foreign attention function computes the right thing, only slowly. States of fixed buffers are no
tensors: a compiler sees through them, and another attention function fails on them by their type.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from duotone.hf.cache.timeline import Timeline
from duotone.hf.cache.windows import FixedStates
from duotone.hf.model.facts import LATENTS
from duotone.quant.autocast import without_autocast

Which = Literal["key", "value"]


class LazyStates(Tensor):
    """K or V of one layer after one step, [batch, kv_heads, logical tokens, head_dim].

    new: this step's dense states. Padding decodes to zeros; the model's mask hides it.
    """

    timeline: Timeline
    index: int
    which: Which
    new: Tensor

    @staticmethod
    def __new__(  # noqa: D102 -- the class docstring says it
        cls, timeline: Timeline, index: int, which: Which, new: Tensor, length: int
    ) -> LazyStates:
        batch, heads, _, dim = new.shape
        shape = (batch, heads, length, dim)
        lazy = Tensor._make_wrapper_subclass(cls, shape, dtype=new.dtype, device=new.device)
        lazy.timeline, lazy.index, lazy.which, lazy.new = timeline, index, which, new
        return lazy

    def __init__(
        self, timeline: Timeline, index: int, which: Which, new: Tensor, length: int
    ) -> None:
        super().__init__()

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"LazyStates({self.which}, {tuple(self.shape)}, layer {self.index})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def dense(x: Any) -> Any:
            return _for_foreign(x) if isinstance(x, LazyStates) else x

        with torch.no_grad():
            args, kwargs = tree_map(dense, (args, kwargs or {}))
        return func(*args, **kwargs)


class StaticStates(FixedStates):
    """K or V of one layer: `new` are this step's states, the rest is in fixed buffers."""

    def __init__(self, timeline: Timeline, index: int, new: Tensor) -> None:
        self.timeline, self.index, self.new = timeline, index, new

    @property
    def shape(self) -> torch.Size:
        """Shape of this step's states: a frozen cache has its length on the device."""
        return self.new.shape


def states_of(
    timeline: Timeline, index: int, key: Tensor, value: Tensor, length: int
) -> tuple[LazyStates, LazyStates]:
    """K and V of a layer that has taken `key` and `value`, `length` tokens in all."""
    return (
        LazyStates(timeline, index, "key", key, length),
        LazyStates(timeline, index, "value", value, length),
    )


def materialize(timeline: Timeline, index: int, which: Which, new: Tensor) -> Tensor:
    """K or V of all tokens of a layer in logical order, dequantized; zeros at padding.

    new: states of the current step, which are read where it has dense ones of its own.
    Errors: NotImplementedError where tokens are evicted (no mask would hide their zeros).
    """
    if timeline.spec.evict is not None:
        raise _foreign("evicts tokens")
    timeline.thaw()
    own = timeline.own_from(index)
    out = new.new_zeros(*new.shape[:2], timeline.seen(index), new.shape[3])
    if own != 0:
        state = timeline.state(index, before=own is not None)
        with without_autocast(new.device):
            for segment, roll in timeline.stores[index].placed_segments(state):
                _scatter(out, segment.states(which), roll.positions, roll.lengths)
        if which == "key":
            out = timeline.scales.of_model(index, out)
    if own is not None:
        out[:, :, own:] = new
    return out


def _for_foreign(states: LazyStates) -> Tensor:
    """`materialize` for an attention function that is not ours.

    Errors: NotImplementedError also where scores are calibrated: it would not do that.
    """
    if states.timeline.spec.tau is not None:
        raise _foreign("calibrates scores (tau)")
    timeline = states.timeline
    if timeline.facts.has_latents and timeline.step.start:
        timeline.slow.say("a step of a latent cache", "dequantizes every token", LATENTS)
    return materialize(timeline, states.index, states.which, states.new)


def _scatter(out: Tensor, states: Tensor, positions: Tensor, lengths: Tensor) -> None:
    for b, n in enumerate(lengths.tolist()):
        out[b, :, positions[b, :n].long()] = states[b, :, :n].to(out.dtype)


def _foreign(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"a cache that {what} needs duotone's own attention; another function asked for dense K "
        "and V. Leave the model's attention implementation as it is."
    )
