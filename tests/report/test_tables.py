import json

import pytest

from duotone.report import tables as report

from made_up_results import result


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "quality").mkdir()
    (tmp_path / "quality/a.json").write_text(json.dumps(result()))
    (tmp_path / "quality/b.json").write_text(json.dumps(result("captions")))
    (tmp_path / "other.json").write_text("[1, 2]")
    return tmp_path


def test_tables_are_found_below_a_folder(folder):
    rendered = report.tables(folder)
    assert set(rendered) == {"quality", "quality-summary", "divergence", "tau-grids"}
    assert "documents, anls | captions (question asked later), anls |" in rendered["quality"]
