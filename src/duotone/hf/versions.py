"""The versions of transformers whose caches and `generate` this room is written for."""

import re
from functools import cache
from importlib.metadata import version

OLDEST, NEWEST = (5, 17), (5, 24)
# Of releases, model types that run with no cache at all, and why.
BROKEN = {
    "5.24.0": {
        "llama4": "it reads image_outputs of a language model that gives none "
        "(5.17 to 5.23 run it, tested)"
    },
}


def check_transformers(found: str | None = None) -> None:
    """Raise ImportError for transformers of another minor version; found: the installed one."""
    found = _installed() if found is None else found
    numbers = re.match(r"(\d+)\.(\d+)", found)
    minor = tuple(map(int, numbers.groups())) if numbers else ()
    if not OLDEST <= minor <= NEWEST:
        first, last, after = (".".join(map(str, x)) for x in (OLDEST, NEWEST, _next(NEWEST)))
        raise ImportError(
            f"duotone runs with transformers {first} to {last}; got {found}. "
            f'pip install "transformers>={first},<{after}".'
        )


def check_release(model_type: str, found: str | None = None) -> None:
    """Raise ValueError for a type that a release of transformers cannot run, whatever its cache.

    found: the installed release.
    """
    found = _installed() if found is None else found
    why = BROKEN.get(found, {}).get(model_type)
    if why is not None:
        raise ValueError(
            f"transformers {found} cannot run {model_type!r} with any cache: {why}. Install "
            "another release that duotone takes."
        )


@cache
def _installed() -> str:
    """The version of transformers: reading it takes a millisecond, and each model asks."""
    return version("transformers")


def _next(minor: tuple[int, int]) -> tuple[int, int]:
    return minor[0], minor[1] + 1
