"""Files of the package import each other in one direction, for types as well."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import duotone

ROOT = Path(duotone.__file__).parent


def modules(root: Path) -> dict[str, Path]:
    """{name: file} of a package; a folder has the name of its __init__."""
    parts = {
        path: path.relative_to(root.parent).with_suffix("").parts for path in root.rglob("*.py")
    }
    return {".".join(p).removesuffix(".__init__"): path for path, p in parts.items()}


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports, anywhere in it, but for types alone."""
    found: set[str] = set()
    for node in running(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
    return found & known.keys()


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a tree that Python runs: those below `if TYPE_CHECKING` it does not."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from running(node)


def circle(root: Path) -> list[str] | None:
    """Files that import each other in a circle, or None."""
    known = modules(root)
    graph = {name: imports(path, known) - {name} for name, path in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return None


def test_no_files_import_each_other() -> None:
    assert circle(ROOT) is None


@pytest.mark.parametrize("back", ["from made.one import f", "def g():\n    import made.one"])
def test_a_circle_shows(tmp_path: Path, back: str) -> None:
    package = tmp_path / "made"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text("from made import two\n")
    (package / "two.py").write_text(f"{back}\n")
    assert set(circle(package)) == {"made.one", "made.two"}
