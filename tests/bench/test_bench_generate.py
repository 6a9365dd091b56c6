"""`duotone bench generate`, with a tiny model on a CPU."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from duotone.bench import generate
from duotone.bench.generate import Load, Row, check_row
from duotone.cli import app
from duotone.inference.random_models import image_id, random_model, random_prompt
from duotone.report import tables

CPU = torch.device("cpu")
SMALL = ("--model", "tiny", "--device", "cpu", "--tokens", "40", "--new", "24", "--calls", "2")


def run(*arguments: object) -> object:
    return CliRunner().invoke(app, ["bench", "generate", *map(str, arguments)])


def test_rows_are_measured_and_written(tmp_path: Path) -> None:
    out, rows = tmp_path / "b1.json", ("plain", "kivi@2, no graphs", "quanto@4")
    done = run(*SMALL, *(x for row in rows for x in ("--row", row)), "--out", out)
    assert done.exit_code == 0, done.output
    result = json.loads(out.read_text())
    assert [row["row"] for row in result["rows"]] == list(rows)
    assert result["prompt_tokens"] == 40
    plain, ours, library = result["rows"]
    for row in (plain, ours):
        assert 0 < row["ms_per_token"] <= row["longest_ms"]
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["ms_per_token"])
        assert row["idle"] is None
    assert ours["cache_bytes"] > 0 < ours["cache_bytes_16_bit"]
    assert "reason" in library or library["ms_per_token"] > 0
    text = tables.tables(tmp_path)
    assert "| kivi@2, no graphs |" in text["generate"]
    assert "tiny (4/2 heads), batch 1, 40 tokens, kivi@2" in text["generate-summary"]


def test_weights_can_be_quantized_first() -> None:
    done = run(*SMALL, "--row", "plain", "--recipe", "rtn-w8a8", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["weights"] == "rtn-w8a8"


REFUSED = {
    "an unknown scheme": (("--row", "nope@1"), "nope"),
    "an unknown row": (("--row", "plain@fast"), "--row must be"),
    "few tokens": (("--new", "10"), "24 new tokens"),
    "a short prompt": (("--tokens", "12"), "--tokens must hold a tile of 16"),
    "padding a prompt of pictures": (("--model", "duotone-tiny", "--padded"), "--padded needs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_any_work(name: str) -> None:
    more, message = REFUSED[name]
    done = run(*SMALL, *more)
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())


def test_an_existing_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text("{}")
    done = run(*SMALL, "--out", tmp_path / "old.json")
    assert done.exit_code == 2
    assert "--out must be a new file" in " ".join(done.output.split())


@pytest.mark.parametrize("padded", [False, True])
def test_prompts_have_the_tokens_that_are_asked_for(padded: bool) -> None:
    model = random_model("tiny", CPU, torch.float32)
    given = random_prompt("tiny", model, batch=3, tokens=60, padded=padded)
    assert given["input_ids"].shape == (3, 60)
    tiles = (given["input_ids"] == image_id("tiny")).sum(1)
    assert tiles.tolist() == [3 * 16] * 3
    assert len(given["pixel_values"]) == 9
    assert given["attention_mask"].sum(1).tolist() == ([60, 59, 58] if padded else [60] * 3)


def test_cudnn_is_off_in_its_row_alone() -> None:
    was = torch.backends.cuda.cudnn_sdp_enabled()
    with Row(generate.NO_CUDNN, None).block():
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == was


def test_rows_of_libraries_say_how_they_call_generate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="hqq"):
        check_row("hqq@2")
    settings = Row("hqq@2", None).settings()
    assert settings["cache_config"]["nbits"] == 2
    assert Row(generate.STATIC, None).settings() == {"cache_implementation": "static"}


def test_a_load_has_room_for_its_medians() -> None:
    with pytest.raises(ValueError, match="24 new tokens"):
        Load(batch=1, tokens=40, new_tokens=20)
