"""The shipped spec is the one of its report."""

import json
from pathlib import Path

import duotone

FOLDER = Path(__file__).parents[2] / "results" / "tune" / "duotone-tiny"


def test_the_preset_is_what_its_report_chose():
    report = json.loads((FOLDER / "report.json").read_text())
    spec = duotone.scheme("duotone-tuned")
    assert spec == duotone.CacheSpec.from_dict(report["specs"]["chosen"])
    assert spec == duotone.CacheSpec.from_json((FOLDER / "spec.json").read_text())
    assert report["heldout"]["chosen"]["bits"] <= report["budget"]["bits"]


def test_the_preset_names_no_layers():
    spec = duotone.scheme("duotone-tuned")
    assert (spec.layers, spec.share) == ((), None)


def test_what_it_was_chosen_on_is_not_what_is_reported():
    for task in json.loads((FOLDER / "report.json").read_text())["settings"]["tasks"]:
        assert task["search_split"] == "calibration"
        assert task["heldout_split"] == "heldout"
        assert task["search_digest"] != task["heldout_digest"]
