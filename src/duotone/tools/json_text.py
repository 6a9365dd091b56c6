"""JSON from outside: every fault of a text raises one ValueError."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


def loads(text: str | bytes) -> Any:
    """Return the value that a JSON text stands for.

    Errors: ValueError for text that is no JSON, nests too deeply, names a field twice, or is
    neither str nor bytes. Integers of more digits than Python reads raise it, too.
    """
    if not isinstance(text, (str, bytes)):
        raise ValueError(f"JSON is a text; got a {type(text).__name__}. Dump the value first.")
    try:
        return json.loads(text, object_pairs_hook=_fields)
    except RecursionError:
        raise ValueError(
            f"JSON must nest no deeper than Python's stack; got {len(text)} characters that do. "
            "Is this the right file?"
        ) from None
    except ValueError as error:
        raise ValueError(f"valid JSON is needed; got {error}. Is the file cut off?") from error


def _fields(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the field {twice!r} twice in one object")
    return fields
