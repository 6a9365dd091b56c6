"""All commands: help, answers on stdout, errors in one line."""

import json
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from cli_runs import error_of, run

import duotone
from duotone.cli import app
from duotone.cli.common import megabytes, scheme_spec
from duotone.defaults import CONVERSATIONS

from paths import REPOSITORY


def test_the_command_line_is_lean():
    heavy = {"torch", "transformers", "triton"}
    code = f"import duotone.cli, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_python_dash_m_runs_it():
    command = [sys.executable, "-m", "duotone", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"duotone {duotone.__version__}\n"


def test_schemes_as_json_are_specs():
    listed = json.loads(run("schemes", "--json").stdout)
    assert set(listed) == set(duotone.schemes())
    assert duotone.CacheSpec.from_dict(listed["kivi"]["spec"]) == duotone.scheme("kivi")


@pytest.mark.parametrize("command", [("compare",), ("bench", "generate")])
def test_a_device_that_torch_does_not_have_is_a_users_error(command):
    assert "the device must be one that this torch can use" in error_of(*command, "--device", "xy")


def test_schemes_lists_every_scheme():
    rows = (line.split("│") for line in run("schemes").output.splitlines())
    names = (cells[1].strip() for cells in rows if len(cells) > 1)
    assert [name for name in names if name] == list(duotone.schemes())


def test_compare_shows_both_answers_and_a_sentence(tiny, picture):
    asked = ("--image", picture, "-q", "what is this ?", "-q", "how many red ?")
    result = run("compare", *asked, "--scheme", "minmax", "--max-new-tokens", 5)
    assert result.exit_code == 0, result.output
    for part in ("noise.png", "16-bit answer", "1-bit answer", "time per token (cpu"):
        assert part in result.stdout
    assert "of 2 answers are word for word the same." in " ".join(result.stdout.split())
    assert result.stdout.startswith("2 questions about noise.png, answered by tiny")
    assert result.stdout.index("x smaller at 1 bit") < result.stdout.index("16-bit answer")


def test_compare_shows_two_schemes_beside_each_other(tiny, picture):
    asked = ("compare", "-i", picture, "-q", "what is this ?", "-s", "dense", "--beside", "minmax")
    shown = run(*asked, "--max-new-tokens", 3).stdout
    assert "dense and minmax" in shown.replace("\n", " ")
    data = json.loads(run(*asked, "--json", "--max-new-tokens", 3).stdout)
    assert (data["scheme"], data["beside"]["scheme"]) == ("dense", "minmax")
    assert data["answers"][0]["reference"] == data["beside"]["answers"][0]["reference"]
    assert "another scheme" in error_of("compare", "-s", "minmax", "--beside", "minmax")


def test_compare_without_a_scheme_takes_the_recommended_one(tiny, picture):
    asked = ("compare", "-i", picture, "-q", "what is this ?", "--max-new-tokens", 3)
    assert json.loads(run(*asked, "--json").stdout)["scheme"] == CONVERSATIONS
    data = json.loads(run(*asked, "--json", "--beside", "minmax").stdout)
    assert (data["scheme"], data["beside"]["scheme"]) == (CONVERSATIONS, "minmax")
    assert "another scheme" in error_of(*asked, "--beside", CONVERSATIONS)


def test_compare_says_only_what_differs_and_no_numbers_of_nothing(tiny, picture):
    """Under a scheme of the whole stream pictures are no spans that could be counted apart."""
    asked = ("compare", "-i", picture, "-q", "what is this ?", "--max-new-tokens", 3)
    shown = run(*asked, "-s", "dense").stdout
    assert "the same" in shown
    assert "pictures' cache" not in shown
    assert "visual number" not in shown


def test_missing_and_broken_pictures(tiny, tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    assert "existing file" in error_of("compare", "--image", tmp_path / "gone.png")
    assert "image file" in error_of("compare", "--image", tmp_path / "text.png")


@pytest.mark.parametrize("command", [("compare",), ("evaluate", "documents")])
def test_unknown_schemes_name_the_nearest(command):
    assert "calibquant" in error_of(*command, "--scheme", "calibqant")


def test_wrong_bits(tiny, picture):
    assert "bits must be one of" in error_of("compare", "-i", picture, "--bits", 5)


def test_names_carry_bits_in_every_command():
    assert scheme_spec("calibquant@2", None) == scheme_spec("calibquant", 2)
    assert scheme_spec("calibquant@2", None) != scheme_spec("calibquant", None)
    with pytest.raises(ValueError, match="says its own"):
        scheme_spec("calibquant@2", 1)
    with pytest.raises(ValueError, match="NAME or NAME@BITS"):
        scheme_spec("calibquant@one", None)


def test_questions_need_pictures():
    assert "--question needs a picture" in error_of("compare", "--question", "what?")


def test_a_text_model_cannot_be_asked_about_pictures(words_only, picture):
    told = error_of("compare", "--image", picture, "--scheme", "kivi")
    assert "pictures need a multimodal model, got 'words'" in told


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/model"])
def test_a_model_folder_that_is_none(picture, name):
    assert "folder with a config.json" in error_of("compare", "-i", picture, "--model", name)


def test_out_of_memory_says_what_would_fit(tiny, picture, monkeypatch):
    def fail(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    seen = {}

    def plan(model, spec, **counts):
        seen.update(counts)
        return SimpleNamespace(bytes_per_sequence=2.5e9, max_batch=3)

    monkeypatch.setattr(tiny.model, "generate", fail)
    monkeypatch.setitem(vars(duotone), "plan", plan)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8_000_000_000, 0))
    message = error_of("compare", "-i", picture, "-q", "what is this ?", "--max-new-tokens", 7)
    assert "takes 2.50 GB of cache, so 3 fit into the free 8.00 GB" in message
    assert (seen["visual_tokens"], seen["text_tokens"], seen["new_tokens"]) == (16, 8, 7)


def test_debugging_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("DUOTONE_DEBUG", "1")
    assert isinstance(run("compare", "-s", "calibqant").exception, ValueError)


@pytest.mark.parametrize(
    ("count", "text"), [(1.07e9, "1.07 GB"), (25e6, "25.00 MB"), (1500, "1.50 kB"), (12, "12 B")]
)
def test_megabytes(count, text):
    assert megabytes(count) == text


@pytest.mark.slow
def test_the_demo_on_the_embedded_model():
    data = json.loads(run("compare", "--json").stdout)
    assert data["parameters"] == 11_481_600
    assert len(data["answers"]) >= 10
    assert data["memory"]["visual_bits_per_element"] <= 1.3
    assert data["visual_ratio"] > 12
    assert {"Paula Nelu", "purple house"} <= {answer["reference"] for answer in data["answers"]}


def test_supports_prints_the_row_of_a_config():
    row = json.loads(run("supports", "--json").stdout)
    assert (row["model_type"], row["words"]["cache"]) == ("internvl", "works")
    assert row["scheme"] == CONVERSATIONS
    shown = run("supports", "--scheme", "kivi").stdout
    assert "few-bit cache          works\n" in shown


@pytest.mark.parametrize("name", ["config.txt", "spec.json", "empty"])
def test_supports_needs_a_config(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "spec.json").write_text("{}")
    expected = "a model must be" if name == "empty" else "a local model must be a folder"
    path = tmp_path if name == "empty" else tmp_path / name
    assert expected in error_of("supports", path)


def test_the_page_of_commands_has_every_one():
    page = (REPOSITORY / "docs" / "commands.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `duotone (\w+)` \|", page, re.M)
    commands = [command.name for command in app.registered_commands]
    commands += [group.name or group.typer_instance.info.name for group in app.registered_groups]
    assert sorted(listed) == sorted(commands)
