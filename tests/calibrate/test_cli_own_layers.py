"""`duotone calibrate` of models whose layers keep states or pictures, from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
from cli_runs import error_of, run
from hybrid_commands import FolderOf, folder_of

import duotone
from duotone.quant.bases import Bases

__all__ = ["folder_of"]  # a fixture
# Wherever this machine stands, which of two specs is nearer is not the rule here.
SMALL = ("-n", "2", "--heldout", "2", "--device", "cpu", "--keep-found")
SHORT = ("--context", "56", "--group", "16", "--recent", "8")


def calibrated(out: Path, *asked: Any) -> tuple[duotone.CacheSpec, dict[str, Any]]:
    result = run("calibrate", *asked, *SMALL, "-o", out)
    assert result.exit_code == 0, result.output
    report = json.loads(out.with_suffix(".report.json").read_text())
    assert report["verdict"]["found"]["packed"] > 0
    return duotone.CacheSpec.from_file(out.with_suffix(".json")), report


def test_pictures_and_text_of_a_model_with_states(folder_of: FolderOf, tmp_path: Path) -> None:
    asked = (folder_of("qwen3_5"), "--text", "calibrated@2", *SHORT)
    spec, report = calibrated(tmp_path / "mine", *asked)
    assert report["header"]["data"][0]["task"] == "made-up"
    assert report["text"]["header"]["data"][0]["task"] == "written"
    assert isinstance(spec.visual, duotone.KVSpec)
    assert isinstance(spec.text, duotone.KVSpec)
    # Of 5 layers two have K and V.
    for name in ("mine.safetensors", "mine.text.safetensors"):
        assert len(Bases.load(tmp_path / name).key) == 2


@pytest.mark.parametrize("name", ["qwen3_next", "mllama"])
def test_text_of_models_whose_tokens_are_text(
    name: str, folder_of: FolderOf, tmp_path: Path
) -> None:
    spec, report = calibrated(tmp_path / "mine", folder_of(name), *SHORT)
    assert report["header"]["data"][0]["task"] == "written"
    assert spec.visual == "text"


def test_made_up_pictures_are_for_models_with_visual_tokens(
    folder_of: FolderOf, tmp_path: Path
) -> None:
    asked = (folder_of("mllama"), "--task", "made-up", "-o", tmp_path / "mine")
    refused = error_of("calibrate", *asked)
    assert "a 'mllama' whose tokens are text only" in refused
