"""Deep copies of a model while duotone is attached to it: clean models, as before the block.

`copy.deepcopy` asks an object itself for `__deepcopy__`, so a model has one of its own for as long
as something of ours is on it.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

ATTRIBUTE = "__deepcopy__"
# Where torch keeps a module's hooks, by their number.
HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


# Takes what is ours off a copy. Given the copy, and what `copy.deepcopy` remembers.
Clean = Callable[[PreTrainedModel, dict[int, Any]], None]


def copied_clean(model: PreTrainedModel, clean: Clean) -> None:
    """Let `clean` have every deep copy of a model, until `copied_as_it_is`."""
    # Weakly: a model that refers to itself would outlive its last user.
    model.__dict__[ATTRIBUTE] = partial(_copy, weakref.ref(model), clean)


def copied_as_it_is(model: PreTrainedModel) -> None:
    """Undo `copied_clean`."""
    model.__dict__.pop(ATTRIBUTE, None)


def _copy(
    given: weakref.ref[PreTrainedModel], clean: Clean, memo: dict[int, Any]
) -> PreTrainedModel:
    model = given()
    own = getattr(type(model), ATTRIBUTE, None)
    clone = _plain_copy(model, memo) if own is None else own(model, memo)
    clone.__dict__.pop(ATTRIBUTE, None)
    clean(clone, memo)
    return clone


def _plain_copy(model: PreTrainedModel, memo: dict[int, Any]) -> PreTrainedModel:
    """Copy a module as `copy.deepcopy` does."""
    make, given, state = model.__reduce_ex__(4)[:3]
    clone = make(*given)
    memo[id(model)] = clone
    state = {name: value for name, value in state.items() if name != ATTRIBUTE}
    clone.__setstate__(copy.deepcopy(state, memo))
    return clone


def drop_hooks(module: nn.Module, numbers: Collection[int]) -> None:
    """Take hooks off a module by their numbers."""
    for name in HOOKS:
        for number in numbers:
            getattr(module, name).pop(number, None)
