"""Files of one case become one result."""

from typing import Any

import pytest

from benchmarks.quality.zoo_files import cases_of, newest


def file(created: str, counts: list[int], seed: int = 1, **sums: list[float]) -> dict[str, Any]:
    rows = [
        {"row": k, "kl": sum(x) / sum(counts), "kl_interval": 0.0, "kl_sums": x, "accuracy": 0.5}
        for k, x in sums.items()
    ]
    header = {"model": "a", "stress": "none", "created": created, "seed": seed}
    return header | {"rows": [{"row": "16 bit", "tokens": counts}, *rows]}


def test_later_rows_stand_beside_those_of_before_on_common_sequences() -> None:
    before = file("1", [1, 3], kept=[1.0, 1.0], again=[8.0, 8.0])
    after = file("2", [1, 3, 4], again=[1.0, 3.0, 100.0], new=[0.0, 2.0, 9.0])
    (case,) = cases_of([after, before])
    assert case["created"] == "2"
    plain, *rows = case["rows"]
    assert plain["tokens"] == [1, 3]
    assert [(row["row"], row["kl"]) for row in rows] == [
        ("kept", 0.5),
        ("again", 1.0),
        ("new", 0.5),
    ]
    assert ["accuracy" in row for row in rows] == [True, False, False]
    assert rows[1]["kl_interval"] == 0
    assert rows[2]["kl_interval"] > 0


def test_files_of_other_seeds_are_other_cases() -> None:
    files = [file("1", [1], seed=1, x=[1.0]), file("2", [2], seed=2, x=[4.0])]
    assert [case["rows"][1]["kl"] for case in cases_of(files)] == [1.0, 2.0]
    (case,) = newest(files)
    assert case["seed"] == 2


def test_files_with_other_answers_are_refused() -> None:
    with pytest.raises(ValueError, match="must have the same answers; got others for a, none"):
        cases_of([file("1", [1, 3], x=[1.0, 1.0]), file("2", [2, 3], x=[1.0, 1.0])])
