"""`duotone tune --memory`: options, files, and what is said."""

import json

import numpy as np
import pytest
from cli_runs import error_of, run
from PIL import Image

import duotone
from duotone.hf.weights import checkpoint

from mquant_setups import tiny_loaded

pytest.importorskip("optuna")

ASKED = ("tune", "documents", "--memory", "100MB")
LOAD = ("--sequences", 4, "--tokens", 100)

REFUSED = {
    "no load": (ASKED, "--sequences and --tokens missing"),
    "a budget, too": ((*ASKED, *LOAD, "-b", 2), "--budget-bits does not go with it"),
    "a found spec": ((*ASKED, *LOAD, "--keep-found"), "--keep-found does not go with it"),
    "an unknown recipe": ((*ASKED, *LOAD, "--weights", "rtn"), "did you mean rtn"),
    "no memory": (("tune", "-b", 2, "--weights", "none"), "--weights belong to a search under all"),
    "a size without a unit": (("tune", "--memory", "24", *LOAD), "write 24GB"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_any_work(name, tmp_path):
    arguments, message = REFUSED[name]
    assert message in error_of(*arguments, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_text_file_has_no_answers_to_calibrate_on(tmp_path):
    file = tmp_path / "story.txt"
    file.write_text("a b c " * 2000)
    refused = error_of("tune", file, "--memory", "100MB", *LOAD, "--out", tmp_path / "out")
    assert "weights are calibrated on prompts with their answers" in refused


@pytest.fixture
def rows(tmp_path):
    file = tmp_path / "mine.jsonl"
    with file.open("w") as lines:
        for number in range(6):
            pixels = np.random.default_rng(number).integers(0, 256, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{number}.png")
            row = {"question": "what is this ?", "answers": ["red"], "images": [f"{number}.png"]}
            lines.write(json.dumps(row) + "\n")
    return file


def test_from_memory_to_a_folder_and_a_spec(rows, tmp_path, monkeypatch):
    monkeypatch.setattr("duotone.cli.joint.load_model", lambda *_: tiny_loaded())
    out = tmp_path / "out"
    asked = ("tune", rows, "--memory", "1100kB", "--reserve", "1kB", "--sequences", 20)
    asked += ("--tokens", 30, "--weights", "rtn-w8a8", "-n", 2, "--heldout", 2, "--trials", 1)
    done = run(*asked, "--out", out)
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "Kept: rtn-w8a8 with the cache '16-bit'" in said
    assert f"duotone compare --model {out}/rtn-w8a8/weights --scheme {out}/spec.json" in said
    assert duotone.CacheSpec.from_file(out / "spec.json") == duotone.scheme("dense")
    assert checkpoint.is_quantized_folder(out / "rtn-w8a8" / "weights")
    report = json.loads(run(*asked, "--out", out, "--json").stdout)
    assert report == json.loads((out / "report.json").read_text())
    assert report["rows"][0]["is_dense"]
