"""Notebooks run from top to bottom, and hold the outputs of such a run."""

import base64
import io
import json
from pathlib import Path

import pytest
from PIL import Image

from notebooks.run import NOTEBOOKS, code_cells, kinds, main, run

SLOW = {"3-your-own-pictures.ipynb", "4-a-scheme-of-your-own.ipynb"}
LARGEST_BYTES = 100_000


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def cases():
    assert {path.name for path in NOTEBOOKS} > SLOW
    marks = {name: [pytest.mark.slow] for name in SLOW}
    return [pytest.param(p, marks=marks.get(p.name, []), id=p.stem) for p in NOTEBOOKS]


@pytest.mark.parametrize("path", cases())
def test_a_notebook_runs_and_its_outputs_are_stored(path, tmp_path):
    stored = read(path)
    notebook = read(path)
    run(notebook, path.name, tmp_path)
    assert kinds(notebook) == kinds(stored)
    assert len(code_cells(stored)) > 4


@pytest.mark.gpu
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_a_gpu(path, tmp_path):
    notebook = read(path)
    stored = kinds(notebook)
    run(notebook, path.name, tmp_path)
    assert kinds(notebook) == stored


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_readable_by_jupyter(path):
    notebook = read(path)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    assert path.stat().st_size < LARGEST_BYTES
    assert [cell["execution_count"] for cell in code_cells(notebook)] == [
        *range(1, len(code_cells(notebook)) + 1)
    ]


def cells(*sources):
    made = [{"cell_type": "code", "source": [source], "outputs": []} for source in sources]
    return {"cells": [{"cell_type": "markdown", "source": ["# Title"]}, *made]}


def test_outputs_are_what_is_printed_and_a_last_expression(tmp_path):
    notebook = cells("x = 3\nprint(x)\nx + 1", "x", "y = x", "x; None")
    run(notebook, "made.ipynb", tmp_path)
    outputs = [cell["outputs"] for cell in code_cells(notebook)]
    assert outputs[0][0]["text"] == ["3\n"]
    assert outputs[0][1]["data"] == {"text/plain": ["4"]}
    assert [len(found) for found in outputs] == [2, 1, 0, 0]


def test_a_picture_is_stored_as_png(tmp_path):
    notebook = cells("from PIL import Image\nImage.new('RGB', (4, 3))")
    run(notebook, "made.ipynb", tmp_path)
    (output,) = code_cells(notebook)[0]["outputs"]
    assert output["data"]["text/plain"] == ["<picture of 4 x 3>"]

    with Image.open(io.BytesIO(base64.b64decode(output["data"]["image/png"]))) as image:
        assert image.size == (4, 3)


def test_other_values_that_can_be_saved_are_no_pictures(tmp_path):
    notebook = cells("from types import SimpleNamespace\nSimpleNamespace(save=1)")
    run(notebook, "made.ipynb", tmp_path)
    assert code_cells(notebook)[0]["outputs"][0]["data"] == {"text/plain": ["namespace(save=1)"]}


def test_a_cell_that_fails_is_named(tmp_path):
    before = Path.cwd()
    with pytest.raises(ZeroDivisionError) as error:
        run(cells("x = 1", "x / 0"), "made.ipynb", tmp_path)
    assert error.value.__notes__ == ["in code cell 2 of made.ipynb"]
    assert Path.cwd() == before


def test_a_check_stores_nothing_and_notices_other_outputs(tmp_path, monkeypatch, capsys):
    path = tmp_path / "made.ipynb"
    path.write_text(json.dumps(cells("1 + 1")))
    before = path.read_text()
    monkeypatch.setattr("sys.argv", ["run", "--check", str(path)])
    with pytest.raises(SystemExit, match="outputs are of other kinds"):
        main()
    assert path.read_text() == before
    monkeypatch.setattr("sys.argv", ["run", str(path)])
    main()
    monkeypatch.setattr("sys.argv", ["run", "--check", str(path)])
    main()
    assert "2" in read(path)["cells"][1]["outputs"][0]["data"]["text/plain"]
