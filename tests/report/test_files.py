import json

import pytest

from duotone.report.files import UNFINISHED, read_file
from duotone.report.tables import read_results
from duotone.tools.resume import SUFFIX

RESULT = {"schema": "duotone.mine/1", "text": "two\u2028lines"}


def lines(path, *values):
    text = "".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values)
    path.write_text(text, encoding="utf-8")
    return path


def test_every_line_of_a_jsonl_is_a_result(tmp_path):
    lines(tmp_path / "b.jsonl", RESULT | {"n": 1}, {"no": "schema"}, RESULT | {"n": 2}, [3])
    (tmp_path / "a").mkdir()
    lines(tmp_path / "a/one.json", RESULT | {"n": 0})
    lines(tmp_path / "c.json", RESULT | {"n": 3})
    assert read_results(tmp_path) == [RESULT | {"n": n} for n in range(4)]


def test_a_file_may_lack_its_last_line_break(tmp_path):
    path = lines(tmp_path / "a.jsonl", RESULT, RESULT)
    path.write_text(path.read_text().rstrip("\n"))
    assert read_file(path) == [RESULT, RESULT]


@pytest.mark.parametrize("wrong", ['{"schema": "duotone', "", '{"a": 1, "a": 2}'])
def test_a_wrong_line_is_named(wrong, tmp_path):
    path = lines(tmp_path / "some.jsonl", RESULT, RESULT)
    path.write_text(path.read_text() + wrong + "\n" + json.dumps(RESULT))
    with pytest.raises(ValueError, match=r"a result file is JSON; got line 3 of '.*some\.jsonl'"):
        read_results(tmp_path)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "latin.jsonl").write_bytes(b'{"a": "\xfc"}\n')
    with pytest.raises(ValueError, match=r"is UTF-8; got '.*latin\.jsonl'"):
        read_results(tmp_path)


def test_unfinished_evaluations_are_left_out(tmp_path):
    assert SUFFIX == UNFINISHED
    (folder := tmp_path / f"captions-0123456789{SUFFIX}").mkdir()
    lines(folder / "identity.json", RESULT)
    assert read_results(tmp_path) == []
    assert read_results(folder) == [RESULT]
