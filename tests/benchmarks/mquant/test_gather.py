"""Files of one recipe each become lines of one file per stress."""

import json

import pytest

from benchmarks.mquant.gather import gather
from duotone.report.files import read_file


def write(folder, recipe, stress, kl):
    folder.mkdir(parents=True, exist_ok=True)
    result = {"recipe": recipe, "stress": stress, "kl": kl}
    (folder / f"{recipe}.json").write_text(json.dumps(result))


def test_a_recipe_measured_again_replaces_its_line_and_others_stay(tmp_path):
    for run, recipes in (("first", {"rtn-w4a8": 3, "mquant-w4a8": 2}), ("second", {"rtn-w4a8": 1})):
        for recipe, kl in recipes.items():
            write(tmp_path / run / "hidden-x64", recipe, "hidden x64", kl)
        paths = gather(tmp_path / run, tmp_path / "out")
    assert paths == [tmp_path / "out" / "hidden-x64.jsonl"]
    rows = read_file(paths[0])
    assert [(row["recipe"], row["kl"]) for row in rows] == [("mquant-w4a8", 2), ("rtn-w4a8", 1)]


def test_a_result_in_the_folder_of_another_stress_is_refused(tmp_path):
    write(tmp_path / "none", "rtn-w4a8", "none", 1)
    write(tmp_path / "values-x16", "rtn-w4a8", "none", 1)
    with pytest.raises(ValueError, match=r"rtn-w4a8 of 'none' in .*values-x16"):
        gather(tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
