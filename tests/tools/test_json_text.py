"""Files of JSON that cannot be read end in one ValueError, and in one line of the command line."""

import json
from pathlib import Path

import pytest
from cli_runs import error_of

from duotone.evaluate.records import file_stem, finished
from duotone.report.tables import tables
from duotone.tasks import get_task
from duotone.tools import json_text

BROKEN = {
    "deep": ("[" * 10_000 + "]" * 10_000, "nest no deeper .* got 20000 characters"),
    "deep, cut off": ('{"a":' * 10_000, "nest no deeper"),
    "long integer": ("9" * 5000, "valid JSON is needed; got Exceeds"),
    "cut off": ('{"a": [1, 2', "valid JSON is needed; got Expecting"),
    "empty": ("", "valid JSON is needed; got Expecting"),
    "a field twice": ('{"a": 1, "b": 2, "a": 3}', "got the field 'a' twice"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_broken_text_raises_one_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        json_text.loads(text)


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON is a text; got a list"):
        json_text.loads([1])


def test_good_text_is_read_as_json_reads_it() -> None:
    for text in ('{"a": {"b": [1, 2.5, null, "x"]}, "c": {"b": true}}', "[]", "3", b'"bytes"'):
        assert json_text.loads(text) == json.loads(text)


def broken(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_every_door_names_the_file(text: str, message: str, tmp_path: Path) -> None:
    broken(tmp_path, "some-result.json", text)
    with pytest.raises(ValueError, match=r"(?s)some-result\.json.*" + message):
        tables(tmp_path)
    configuration = {"task": "captions", "scheme": "kivi"}
    kept = broken(tmp_path, f"{file_stem(configuration)}.json", text)
    with pytest.raises(ValueError, match=f"(?s){kept.name}.*{message}"):
        finished(tmp_path, {"kivi": configuration})
    if text:
        broken(tmp_path, "mine.jsonl", text)
        with pytest.raises(ValueError, match=f"(?s){message}"):
            get_task(str(tmp_path / "mine.jsonl"))


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_the_command_line_says_it_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    spec = broken(tmp_path, "mine.json", text)
    calls = [["plan", "-s", str(spec)], ["report", "--results", str(tmp_path)]]
    if text:
        calls.append(["evaluate", str(broken(tmp_path, "mine.jsonl", text)), "-s", "kivi"])
    for arguments in calls:
        line = error_of(*arguments)
        assert "mine.json" in line
        with pytest.raises(ValueError, match=message):
            raise ValueError(line)


def test_results_without_their_fields_are_named(tmp_path: Path) -> None:
    broken(tmp_path, "some.json", '{"schema": "duotone.tune/1"}')
    with pytest.raises(ValueError, match=r"schema 'duotone.tune/1' must have its fields"):
        tables(tmp_path)


def test_a_result_that_is_no_object_is_refused(tmp_path: Path) -> None:
    configuration = {"task": "captions", "scheme": "kivi"}
    broken(tmp_path, f"{file_stem(configuration)}.json", "[]")
    with pytest.raises(ValueError, match="a result file holds an object"):
        finished(tmp_path, {"kivi": configuration})
