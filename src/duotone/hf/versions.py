"""The versions of transformers whose caches and `generate` this room is written for."""

import re
from importlib.metadata import version

OLDEST, NEWEST = (5, 17), (5, 23)


def check_transformers(found: str | None = None) -> None:
    """Raise ImportError for transformers of another minor version; found: the installed one.

    5.24 renames the argument in which `generate` takes a cache, and steps are no longer heard of.
    """
    found = version("transformers") if found is None else found
    numbers = re.match(r"(\d+)\.(\d+)", found)
    minor = tuple(map(int, numbers.groups())) if numbers else ()
    if not OLDEST <= minor <= NEWEST:
        first, last, after = (".".join(map(str, x)) for x in (OLDEST, NEWEST, _next(NEWEST)))
        raise ImportError(
            f"duotone runs with transformers {first} to {last}; got {found}. "
            f'pip install "transformers>={first},<{after}".'
        )


def _next(minor: tuple[int, int]) -> tuple[int, int]:
    return minor[0], minor[1] + 1
