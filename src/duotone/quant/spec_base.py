"""Base of specs: frozen, JSON-safe data, and the wording of a broken rule."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING, Field, asdict, field, fields
from dataclasses import replace as dataclass_replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from duotone.tools import json_text

R = TypeVar("R", bound="Record")
# No sequence, group or model is this large; indices of kernels have 32 bits.
LARGEST_COUNT = 2**31 - 1
LONGEST_SHOWN = 400

# Roles of fields (`quant.honours`): which codes and parameters are stored, how they are read, or
# which tokens a policy covers.
ROLE, STORED, DECODED, POLICY = "role", "stored", "decoded", "policy"


def stored(default: Any) -> Any:
    """Declare a field that changes which codes and parameters are stored."""
    return field(default=default, metadata={ROLE: STORED})


def decoded(default: Any) -> Any:
    """Declare a field that changes how codes and parameters are read back."""
    return field(default=default, metadata={ROLE: DECODED})


def of_policy(default: Any = MISSING, **given: Any) -> Any:
    """Declare a field that chooses tokens, layers or their quantizers."""
    return field(default=default, metadata={ROLE: POLICY}, **given)


def role_of(of: Field) -> str:
    """Role of a field; a field that declares none counts as decoded."""
    return of.metadata.get(ROLE, DECODED)


def require(condition: bool, rule: str, got: object, remedy: str) -> None:
    """Raise ValueError with the rule, the given value and the remedy."""
    if not condition:
        raise ValueError(f"{rule}; got {shown(got)}. {remedy}".rstrip())


def shown(value: object) -> str:
    """Return the repr of any value, cut where it is long, named by its type where it has none."""
    try:
        text = repr(value)
    except Exception:  # Python refuses numbers of many digits and lists that nest deeply.
        return f"a value of type {type(value).__name__} that Python cannot print"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def is_count(value: object) -> bool:
    """True for an integer from 0 to `LARGEST_COUNT`."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT


def is_number(value: object) -> bool:
    """True for a finite number that a float can hold."""
    is_real = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_real and abs(value) <= sys.float_info.max


def is_word(value: object, words: tuple[str, ...]) -> bool:
    """True for one of `words`; other types are never compared."""
    return isinstance(value, str) and value in words


class Record:
    """Base of all spec classes: `replace`, `to_dict` and the checks of unknown fields.

    NEEDED: fields that data from a file must have, each with its alternatives. GONE: {field that
    older specs had: what to do without it}.
    """

    NEEDED: ClassVar[tuple[tuple[str, ...], ...]] = ()
    GONE: ClassVar[Mapping[str, str]] = {}

    def __new__(cls: type[R], /, *values: Any, **named: Any) -> R:
        """Check the names of the arguments. Errors: ValueError, not TypeError, as for values."""
        known = _check_names(cls, named)
        rule = f"{cls.__name__} takes at most {len(known)} values"
        require(len(values) <= len(known), rule, len(values), "Name the fields.")
        twice = [name for name in known[: len(values)] if name in named]
        require(not twice, f"{cls.__name__} takes each field once", twice, "Drop one of the two.")
        return super().__new__(cls)

    def replace(self: R, /, **changes: Any) -> R:
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
        return cls.from_dict(json_text.loads(text))

    @classmethod
    def from_file(cls: type[R], path: str | Path) -> R:
        """Read the JSON of `to_json` from a file; paths in it may be relative to its folder.

        Errors: ValueError naming the file.
        """
        try:
            return cls.from_dict(cls._of_folder(_read(path), Path(path).parent))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def _of_folder(cls, data: Any, folder: Path) -> Any:
        """Data of a file in a folder, with paths that are relative to it."""
        return data

    @classmethod
    def from_dict(cls: type[R], data: Mapping[str, Any]) -> R:
        """Inverse of `to_dict`; unknown fields and missing ones of `NEEDED` raise ValueError."""
        rule = f"a {cls.__name__} is a JSON object"
        require(isinstance(data, Mapping), rule, data, "See to_json().")
        _check_names(cls, data)
        for names in cls.NEEDED:
            ok = any(name in data for name in names)
            rule = f"data of a {cls.__name__} must have the field {' or '.join(names)}"
            require(ok, rule, dict(data), "A default would choose a quantizer in silence.")
        return cls(**data)


def _read(path: str | Path) -> Any:
    return json_text.loads(Path(path).read_text(encoding="utf-8"))


def _check_names(cls: type[Record], given: Mapping[str, Any]) -> list[str]:
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for name in given:
        remedy = cls.GONE.get(name)
        require(remedy is None, f"{cls.__name__} has no {name} any more", given[name], str(remedy))
    unknown = [name for name in given if name not in known]
    require(not unknown, f"{cls.__name__} has the fields {known}", unknown, "Check the spelling.")
    return known
