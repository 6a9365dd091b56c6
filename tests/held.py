"""Bytes that a cache keeps, found by walking: `memory()` is compared with them."""

from __future__ import annotations

import types
import weakref
from typing import Any

from torch import Tensor

# The model's, and what the caller has given: nobody's bytes but theirs.
NOT_OURS = ("_attachment", "_release", "visual_mask", "facts", "spec")
PLAIN = (str, bytes, int, float, complex, type, types.FunctionType, types.MethodType, weakref.ref)


def reachable(root: Any) -> dict[str, Tensor]:
    """All tensors that can be reached from an object, by one path to each of them."""
    found: dict[str, Tensor] = {}
    seen: dict[int, Any] = {}

    def walk(thing: Any, path: str) -> None:
        if thing is None or isinstance(thing, PLAIN) or id(thing) in seen:
            return
        seen[id(thing)] = thing
        if isinstance(thing, Tensor):
            found[path] = thing
        elif isinstance(thing, dict):
            for key, value in thing.items():
                walk(value, f"{path}[{key!r}]")
        elif isinstance(thing, list | tuple | set | frozenset):
            for place, value in enumerate(thing):
                walk(value, f"{path}[{place}]")
        elif hasattr(thing, "__dict__"):
            for name, value in vars(thing).items():
                if name not in NOT_OURS:
                    walk(value, f"{path}.{name}")

    walk(root, type(root).__name__)
    return found


def storages(root: Any) -> dict[int, tuple[int, str]]:
    """(bytes, a path to it) of every storage that can be reached."""
    held: dict[int, tuple[int, str]] = {}
    for path, tensor in reachable(root).items():
        storage = tensor.untyped_storage()
        held.setdefault(storage._cdata, (storage.nbytes(), path))
    return held


def held_bytes(root: Any) -> int:
    """Bytes of all storages that can be reached, each once."""
    return sum(size for size, _ in storages(root).values())


def listing(root: Any) -> str:
    """For messages: the largest first."""
    sizes = sorted(storages(root).values(), reverse=True)
    return "\n".join(f"{size:>10,} {path}" for size, path in sizes if size)
