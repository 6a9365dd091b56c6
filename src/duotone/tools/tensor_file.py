"""Safetensors files with a JSON header and a checksum of their content.

A reader gets tensors in memory of their own: mapped memory would change with the file. A writer
puts the whole file in place at once. Nothing of a file is used before it is checked.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from duotone.tools.digest import digest

CHECKSUM = "checksum"
MOST_SAID = 1000  # characters of an error's reason
# Errors of Python and its libraries over data of an unexpected kind.
FOREIGN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    NotImplementedError,
    OSError,
    RuntimeError,  # RecursionError too
    TypeError,
    ValueError,
)


def write(
    path: str | Path, tensors: Mapping[str, Tensor], header: Mapping[str, Any], key: str
) -> None:
    """Write a file. header: JSON-safe; it goes under `key` in the file's metadata."""
    from safetensors.torch import save_file

    header = json.loads(json.dumps(header))
    text = json.dumps(header | {CHECKSUM: digest(tensors, header)})
    own = unfinished(path, os.getpid())
    try:
        save_file(dict(tensors), own, metadata={key: text})
        own.replace(path)
    finally:
        own.unlink(missing_ok=True)


def unfinished(path: str | Path, process: int | str = "*") -> Path:
    """Path of a process's unfinished file; by default a pattern of the files of all processes."""
    return Path(f"{path}.{process}.writing")


def read(
    path: str | Path, key: str, what: str, checked: bool = True
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read the header, without its checksum, and all tensors, on the CPU.

    what: e.g. "a saved cache", for errors. checked: False takes a file whose checksum is missing or
    wrong; the header is {} where there is none. Errors: FileNotFoundError; ValueError naming a file
    that is damaged, something else, or without a checksum.
    """
    with damage_named(f"{path} is not {what}"):
        header, tensors = _content(path, key)
        if header is None and not checked:
            header = {}
        if not isinstance(header, dict):
            raise ValueError(f"its metadata has no object {key!r}")
    checksum = header.pop(CHECKSUM, None)
    if checked and checksum is None:
        raise ValueError(
            f"{path} has no checksum: it is damaged, or an earlier version of duotone wrote it. "
            f"Write it anew; waive=('checksum',) loads {what} without one."
        )
    if checked and checksum != digest(tensors, header):
        raise ValueError(
            f"{path} is damaged: its checksum is not that of its content. Copy it again or write "
            f"it anew; waive=('checksum',) loads {what} as it is."
        )
    return header, tensors


def _content(path: str | Path, key: str) -> tuple[Any, dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get(key, "null"))
            names = file.keys()
            return header, {name: file.get_tensor(name).clone() for name in names}
    except SafetensorError as error:
        raise ValueError(str(error)) from error


@contextmanager
def damage_named(subject: str, *also: type[Exception]) -> Iterator[None]:
    """Turn errors that a file's data cause inside the block into a ValueError about `subject`.

    also: errors of other libraries. A missing file stays a FileNotFoundError.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except (*FOREIGN, *also) as error:
        plain = isinstance(error, ValueError)
        reason = " ".join((str(error) if plain else f"{type(error).__name__}: {error}").split())
        raise ValueError(f"{subject}: {reason[:MOST_SAID]}") from (None if plain else error)
