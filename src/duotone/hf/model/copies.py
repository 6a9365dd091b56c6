"""Deep copies of a model while duotone is attached to it: clean models, as before the block.

`copy.deepcopy` asks an object itself for `__deepcopy__`. So a model has one of its own for as long
as something of ours is on it, and so has each of its modules that holds the changed configuration.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Callable, Collection
from typing import Any

from torch import nn

ATTRIBUTE = "__deepcopy__"
# Where transformers keeps a model's compiled call: a copy's would run the first model.
COMPILED = ("_compiled_call", "_last_compile_config")
# Where torch keeps a module's hooks, by their number.
HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


# Takes what is ours off a copy. Given the copy, and what `copy.deepcopy` remembers.
Clean = Callable[[nn.Module, dict[int, Any]], None]


class _CleanCopies:
    """`__deepcopy__` of a module that several attachments may have changed, the last one first."""

    def __init__(self, module: nn.Module) -> None:
        # Weakly: a model that refers to itself would outlive its last user.
        self._module = weakref.ref(module)
        self.cleaners: list[Clean] = []

    def __call__(self, memo: dict[int, Any]) -> nn.Module:
        module = self._module()
        own = getattr(type(module), ATTRIBUTE, None)
        clone = _plain_copy(module, memo) if own is None else own(module, memo)
        for name in (ATTRIBUTE, *COMPILED):
            clone.__dict__.pop(name, None)
        for clean in reversed(self.cleaners):
            clean(clone, memo)
        return clone

    def __reduce__(self) -> Any:
        raise not_pickled()


def not_pickled() -> TypeError:
    """The error of pickling a model, or a part of it, while something of ours is on it."""
    return TypeError(
        "a model cannot be pickled while duotone is attached to it; leave the enable block "
        "and delete its quantized caches, or save model.state_dict()."
    )


def copied_clean(module: nn.Module, clean: Clean) -> None:
    """Let `clean` have every deep copy of a module, until `copied_as_it_is`."""
    copies = module.__dict__.get(ATTRIBUTE)
    if copies is None:
        copies = module.__dict__[ATTRIBUTE] = _CleanCopies(module)
    copies.cleaners.append(clean)


def copied_as_it_is(module: nn.Module, clean: Clean) -> None:
    """Undo `copied_clean`."""
    copies = module.__dict__[ATTRIBUTE]
    copies.cleaners.remove(clean)
    if not copies.cleaners:
        del module.__dict__[ATTRIBUTE]


def copied_method(method: Callable, clone: nn.Module, memo: dict[int, Any]) -> Callable | None:
    """Copy what a model has in the place of a method; None where that would run the first model.

    `copy.deepcopy` returns a compiled method as it is, bound to the model it was compiled for.
    """
    plain = method
    while (inner := getattr(plain, "_torchdynamo_orig_callable", None)) is not None:
        plain = inner
    of_first = isinstance(plain, types.MethodType) and memo.get(id(plain.__self__)) is clone
    return None if plain is not method and of_first else copy.deepcopy(method, memo)


def _plain_copy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy a module as `copy.deepcopy` does."""
    make, given, state = module.__reduce_ex__(4)[:3]
    clone = make(*given)
    memo[id(module)] = clone
    left_out = (ATTRIBUTE, *COMPILED)
    state = {name: value for name, value in state.items() if name not in left_out}
    clone.__setstate__(copy.deepcopy(state, memo))
    return clone


def drop_hooks(module: nn.Module, numbers: Collection[int]) -> None:
    """Take hooks off a module by their numbers."""
    for name in HOOKS:
        for number in numbers:
            getattr(module, name).pop(number, None)
