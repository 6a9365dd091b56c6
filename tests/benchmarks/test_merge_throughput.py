import json

import pytest
from merge_throughput import merge

from duotone.bench.throughput import SCHEMA, Configuration
from duotone.report.files import read_file


def measured(folder, row="16-bit", budget=5, model="tiny", **fields):
    at = Configuration(row, 70, budget * 10**9)
    path = at.path(folder, model)
    path.parent.mkdir(parents=True, exist_ok=True)
    configuration = {**vars(at)}
    result = {"schema": SCHEMA, "model": {"name": model}, "configuration": configuration, **fields}
    path.write_text(json.dumps(result, indent=1))
    return result


def test_results_are_lines_in_the_order_of_their_files(tmp_path):
    new, out = tmp_path / "new", tmp_path / "merged"
    made = [measured(new, "16-bit", 5, step_s=2.6e-05), measured(new, "16-bit", 10)]
    made += [measured(new, "1-bit visual", 5), measured(new, model="other")]
    assert merge(new, out) == {out / "other.jsonl": 1, out / "tiny.jsonl": 3}
    assert read_file(out / "tiny.jsonl") == [made[1], made[2], made[0]] == in_order(new / "tiny")
    assert read_file(out / "other.jsonl") == [made[3]]
    later = measured(tmp_path / "later", "1-bit visual", 10)
    assert merge(tmp_path / "later", out) == {out / "tiny.jsonl": 4}
    assert read_file(out / "tiny.jsonl")[0] == later
    assert (out / "tiny.jsonl").read_text().count(" ") == 2  # of the two names, none between


def in_order(folder):
    return [read_file(path)[0] for path in sorted(folder.glob("*.json"))]


def test_a_second_result_needs_replace(tmp_path):
    measured(tmp_path / "a", batch=1)
    kept = measured(tmp_path / "a", budget=10)
    again = measured(tmp_path / "b", batch=2)
    measured(tmp_path / "b", model="another")
    merge(tmp_path / "a", tmp_path)
    before = (tmp_path / "tiny.jsonl").read_text()
    with pytest.raises(ValueError, match=r"got 1 of its configurations, .*'16-bit'.*--replace"):
        merge(tmp_path / "b", tmp_path)
    assert (tmp_path / "tiny.jsonl").read_text() == before
    assert not (tmp_path / "another.jsonl").exists()
    merge(tmp_path / "b", tmp_path, replace=True)
    assert read_file(tmp_path / "tiny.jsonl") == [kept, again]


def test_two_new_results_of_a_configuration_are_refused(tmp_path):
    measured(tmp_path / "new/a")
    measured(tmp_path / "new/b")
    with pytest.raises(ValueError, match=r"has one result; got a second one of .*16-bit"):
        merge(tmp_path / "new", tmp_path, replace=True)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(ValueError, match="FOLDER must hold results"):
        merge(tmp_path, tmp_path)
    for text in ("[]", '{"schema": "duotone.quality/1"}', json.dumps({"schema": SCHEMA})):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match="a result of throughput is an object of schema"):
            merge(tmp_path, tmp_path)
