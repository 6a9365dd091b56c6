"""Folders of this repository, and its test modules by path."""

import importlib.util
from pathlib import Path
from types import ModuleType

REPOSITORY = Path(__file__).parents[1]


def module_at(path: str) -> ModuleType:
    """A test module, by its path below tests/ without suffix: names alone are not unique."""
    file = REPOSITORY / "tests" / f"{path}.py"
    spec = importlib.util.spec_from_file_location(path.replace("/", "_"), file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
