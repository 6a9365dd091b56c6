"""Runner of notebooks without Jupyter: `python -m notebooks.run` runs all, stores their outputs.

`python -m notebooks.run --check` stores nothing, and fails where outputs are of other kinds.

Cells run in order in one namespace, in a new folder. Printed text and a last expression are
outputs, pictures of Pillow as PNG. Nothing else of IPython is here: notebooks use plain Python.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import os
import sys
import tempfile
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

from PIL import Image

NOTEBOOKS = sorted(Path(__file__).parent.glob("*.ipynb"))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """Cells of code, in order."""
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def run(notebook: dict[str, Any], name: str, folder: Path) -> None:
    """Run a notebook in a folder, and put the outputs into its cells.

    Errors: those of the cells, with a note of which one.
    """
    scope: dict[str, Any] = {"__name__": "__main__"}
    with chdir(folder):
        for number, cell in enumerate(code_cells(notebook), start=1):
            try:
                cell["outputs"] = _outputs("".join(cell["source"]), scope, number)
            except BaseException as error:
                error.add_note(f"in code cell {number} of {name}")
                raise
            cell["execution_count"] = number


def _outputs(source: str, scope: dict[str, Any], number: int) -> list[dict[str, Any]]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with redirect_stdout(printed):
        exec(compile(tree, f"<cell {number}>", "exec"), scope)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), f"<cell {number}>", "eval"), scope)
    outputs = []
    if printed.getvalue():
        text = printed.getvalue().splitlines(keepends=True)
        outputs.append({"name": "stdout", "output_type": "stream", "text": text})
    if value is not None:
        result = {"output_type": "execute_result", "execution_count": number, "metadata": {}}
        outputs.append(result | {"data": _data(value)})
    return outputs


def _data(value: Any) -> dict[str, Any]:
    if not isinstance(value, Image.Image):
        return {"text/plain": repr(value).splitlines(keepends=True)}
    png = io.BytesIO()
    value.save(png, "PNG", optimize=True)
    encoded = base64.b64encode(png.getvalue()).decode()
    return {"image/png": encoded, "text/plain": [f"<picture of {value.width} x {value.height}>"]}


def kinds(notebook: dict[str, Any]) -> list[list[list[str]]]:
    """Kinds of outputs of each cell: text that is printed, pictures, values."""
    return [
        [sorted(output.get("data", [output["output_type"]])) for output in cell["outputs"]]
        for cell in code_cells(notebook)
    ]


def main() -> None:
    """Run the notebooks named, or all, and write their outputs into them."""
    names = sys.argv[1:]
    check = "--check" in names
    for path in [Path(name) for name in names if name != "--check"] or NOTEBOOKS:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        stored = kinds(notebook)
        with tempfile.TemporaryDirectory() as folder:
            run(notebook, path.name, Path(folder))
        if not check:
            text = json.dumps(notebook, indent=1, ensure_ascii=False)
            path.write_text(text + "\n", encoding="utf-8")
        elif kinds(notebook) != stored:
            sys.exit(f"{path.name}: outputs are of other kinds than those stored; run it anew")
        print(f"{path.name}: {os.path.getsize(path) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
