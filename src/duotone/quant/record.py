"""Frozen, JSON-safe records: what specs have in common, and how a broken rule reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any, TypeVar

R = TypeVar("R", bound="Record")


def require(condition: bool, rule: str, got: object, remedy: str) -> None:
    """Raise ValueError with the rule, what was given and the remedy."""
    if not condition:
        raise ValueError(f"{rule}; got {got!r}. {remedy}")


def is_count(value: object) -> bool:
    """An integer >= 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_number(value: object) -> bool:
    """A finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class Record:
    """`replace`, `to_dict` and the checks of unknown fields, shared by the three spec classes."""

    def replace(self: R, **changes: Any) -> R:
        """Return a copy with `changes`; unknown fields and bad values raise ValueError."""
        _check_names(type(self), changes)
        return dataclass_replace(self, **changes)  # type: ignore[type-var]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON-safe data; `from_dict` is the exact inverse."""
        return asdict(self)  # type: ignore[call-overload]

    def to_json(self) -> str:
        """Return `to_dict()` as a JSON string."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls: type[R], text: str) -> R:
        """Inverse of `to_json`. Errors: ValueError for what is no JSON object of known fields."""
        data = json.loads(text)
        require(
            isinstance(data, dict), f"a {cls.__name__} is a JSON object", data, "See to_json()."
        )
        return cls.from_dict(data)

    @classmethod
    def from_file(cls: type[R], path: str | Path) -> R:
        """Read the JSON of `to_json` from a file. Errors: ValueError naming the file."""
        try:
            return cls.from_json(Path(path).read_text())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls: type[R], data: Mapping[str, Any]) -> R:
        """Inverse of `to_dict`; unknown fields raise ValueError."""
        _check_names(cls, data)
        return cls(**data)


def _check_names(cls: type, given: Mapping[str, Any]) -> None:
    known = [field.name for field in fields(cls)]
    unknown = sorted(set(given) - set(known))
    require(not unknown, f"{cls.__name__} has the fields {known}", unknown, "Check the spelling.")
