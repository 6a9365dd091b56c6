"""Files of a search's folder, read back: a damaged one raises a ValueError that names it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from duotone.quant.spec_base import is_number, require
from duotone.tools import json_text
from duotone.tools.tensor_file import damage_named


def reading(path: Path | None, *also: type[Exception]) -> AbstractContextManager[None]:
    """Turn errors that a search's file causes inside the block into a ValueError naming it.

    path: None where a search has no file. also: errors of other libraries.
    """
    if path is None:
        return nullcontext()
    rule = f"a search goes on with the files that it wrote; got {str(path)!r}, which is damaged"
    return damage_named(f"{rule}. Delete it to measure again, or name another --out", *also)


def json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Errors: ValueError for anything else in it."""
    data = json_text.loads(path.read_bytes())
    require(isinstance(data, Mapping), f"{path.name} is a JSON object", data, "")
    return dict(data)


def numbers(data: Mapping[str, Any], name: str, count: int | None = None) -> tuple[float, ...]:
    """Return the finite numbers in a field of `data`. count: how many; None for any."""
    found = data.get(name)
    ok = isinstance(found, Sequence) and not isinstance(found, str) and all(map(is_number, found))
    ok = ok and count in (None, len(found))
    require(ok, f"{name!r} has {'some' if count is None else count} numbers", found, "")
    return tuple(found)


def number(data: Mapping[str, Any], name: str) -> float:
    """Return the finite number in a field of `data`."""
    require(is_number(data.get(name)), f"{name!r} is a finite number", data.get(name), "")
    return data[name]


def numbers_by_name(data: Mapping[str, Any], name: str) -> dict[str, float]:
    """Return the finite numbers by name in a field of `data`."""
    found = data.get(name)
    ok = isinstance(found, Mapping) and all(map(is_number, found.values()))
    require(ok, f"{name!r} has numbers by name", found, "")
    return dict(found)


def text(data: Mapping[str, Any], name: str) -> str:
    """Return the text in a field of `data`."""
    require(isinstance(data.get(name), str), f"{name!r} is a text", data.get(name), "")
    return data[name]
