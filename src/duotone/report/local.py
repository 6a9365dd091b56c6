"""Tables of a repository's own benchmarks, rendered by `duotone report` next to commands'."""

import importlib.util
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

from duotone.report.markdown import Result

Renderer = tuple[str, Callable[[Sequence[Result]], str]]
PACKAGE = "duotone_local_tables"


def local_renderers(repository: Path) -> dict[str, Renderer]:
    """{name: (schema, function)} that a repository defines; empty where the repository names none.

    Its pyproject.toml names a package by a path, which is imported, and may import others of the
    repository by name, also later:

        [tool.duotone.report]
        tables = "benchmarks"   # its __init__.py has RENDERERS

    Errors: ValueError if there is no such package or it lacks RENDERERS.
    """
    file = repository / "pyproject.toml"
    if not file.is_file():
        return {}
    settings = tomllib.loads(file.read_text(encoding="utf-8"))
    named = settings.get("tool", {}).get("duotone", {}).get("report", {}).get("tables")
    if named is None:
        return {}
    door = repository / str(named) / "__init__.py"
    if not door.is_file():
        raise ValueError(
            f"[tool.duotone.report] tables of {file} must name a package with __init__.py; got "
            f"{named!r}. Correct the path or remove the entry."
        )
    if str(repository.absolute()) not in sys.path:  # as it is for `python -m`, and for no command
        sys.path.append(str(repository.absolute()))
    return _renderers_of(door)


def _renderers_of(door: Path) -> dict[str, Renderer]:
    places = [str(door.parent)]
    spec = importlib.util.spec_from_file_location(PACKAGE, door, submodule_search_locations=places)
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = module
    spec.loader.exec_module(module)
    if not isinstance(getattr(module, "RENDERERS", None), dict):
        raise ValueError(f"{door} must define RENDERERS = {{name: (schema, function)}}.")
    return module.RENDERERS
