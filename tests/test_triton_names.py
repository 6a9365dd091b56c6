"""Kernels that cannot be imported without Triton use names that exist."""

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import duotone

PACKAGE = Path(duotone.__file__).parent
KERNELS = sorted(
    path
    for path in PACKAGE.rglob("*.py")
    if any(line.startswith("import triton") for line in path.read_text().splitlines())
)


def missing(source: str) -> Iterator[str]:
    """Names that a module takes from importable modules of the package, and that are not there."""
    tree, imported = ast.parse(source), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("duotone"):
            try:
                module: Any = import_module(node.module)
            except ModuleNotFoundError:  # it needs Triton as well
                continue
            for name in node.names:
                if hasattr(module, name.name):
                    imported[name.asname or name.name] = getattr(module, name.name)
                elif not (
                    PACKAGE.parent / node.module.replace(".", "/") / f"{name.name}.py"
                ).exists():
                    yield f"{node.module}.{name.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = imported.get(node.value.id)
            if owner is not None and not isinstance(owner, type) and not hasattr(owner, node.attr):
                yield f"{node.value.id}.{node.attr}"


def test_there_are_such_kernels() -> None:
    assert len(KERNELS) > 10


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: path.stem)
def test_all_names_are_there(path: Path) -> None:
    assert list(missing(path.read_text())) == []


def test_a_name_that_is_gone_is_found() -> None:
    lines = "from duotone.attention.triton.family import HONOURS, GONE\nHONOURS.widths\n"
    assert list(missing(lines)) == ["duotone.attention.triton.family.GONE", "HONOURS.widths"]
