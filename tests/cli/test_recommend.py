"""`duotone recommend`: spec, bytes, what was measured, and the words of a refusal."""

import json
from pathlib import Path

import pytest
import torch
from cli_runs import error_of, run
from transformers import CONFIG_MAPPING, PreTrainedConfig

import duotone
from duotone.defaults import CONVERSATIONS, TEXT
from duotone.quant.schemes import named

from families import FAMILIES, HYBRIDS


def folder_of(config: PreTrainedConfig, folder: Path) -> Path:
    config.save_pretrained(folder)
    return folder


def words_of(*asked: object) -> str:
    done = run("recommend", *asked)
    assert done.exit_code == 0, done.output
    return " ".join(done.stdout.split())


def test_the_embedded_models_has_bytes_loss_speed_and_why() -> None:
    shown = run("recommend", "--budget", "20GB").stdout
    assert shown.startswith(f"{CONVERSATIONS} for internvl: ")
    for part in ("- pictures fill most of a prompt", "sequences fit into 20.00 GB instead of"):
        assert part in shown
    for command in ("evaluate captions", "bench generate"):
        assert f"For this model: duotone {command} --model duotone-tiny" in shown
    assert "no data: duotone calibrate duotone-tiny --text calibrated@2 -o mine" in shown
    assert "or duotone.calibrated(model, processor)" in shown
    assert "On an H200:\ndecode attention of visual tokens" in shown


def test_what_cannot_be_calibrated_is_not_offered_it(tmp_path: Path) -> None:
    text = folder_of(FAMILIES["llama"].config(), tmp_path / "text")
    for name in ("internvl2.5-8b", text):
        assert "duotone calibrate" not in words_of(name)
    hybrid = folder_of(HYBRIDS["qwen3_5"].config(), tmp_path / "hybrid")
    assert f"duotone calibrate {hybrid} --text" in words_of(hybrid)


def test_json_has_the_spec_the_plan_and_the_rows() -> None:
    found = json.loads(run("recommend", "--budget", "1GB", "--tokens", 2048, "--json").stdout)
    assert duotone.CacheSpec.from_dict(found["spec"]) == named(CONVERSATIONS)
    assert sum(found["usual"][f"{kind}_tokens"] for kind in ("visual", "text", "new")) == 2048
    asked = ("plan", "--scheme", CONVERSATIONS, "--budget", "1GB", "--json")
    usual = found["usual"].items()
    asked += tuple(x for n, count in usual for x in (f"--{n.replace('_', '-')}", count))
    planned = json.loads(run(*asked).stdout)
    assert found["plan"] == {name: planned[name] for name in found["plan"]}
    assert found["attention"] == planned["attention"]
    assert set(found["measured"]) == {"loss", "speed"}


def test_without_a_budget_no_sequences_are_counted() -> None:
    shown = words_of()
    assert "cache per sequence" in shown
    assert "sequences in" not in shown
    assert "fit into" not in shown


def test_a_text_model_has_the_stream_and_losses_of_text(tmp_path: Path) -> None:
    shown = words_of(folder_of(FAMILIES["llama"].config(), tmp_path))
    assert shown.startswith(f"{TEXT} for llama")
    assert "documents: anls" not in shown
    assert f"duotone evaluate perplexity --data TEXT --model {tmp_path} --scheme {TEXT}" in shown


def test_known_shapes_need_no_config() -> None:
    assert words_of("internvl2.5-8b").startswith(f"{CONVERSATIONS} for internvl2.5-8b")


def test_states_are_a_part_of_what_is_planned(tmp_path: Path) -> None:
    folder = folder_of(HYBRIDS["qwen3_5"].config(), tmp_path)
    shown = words_of(folder, "--budget", "1GB")
    assert "sequences fit into 1.00 GB instead of" in shown
    assert "3 of 5 layers keep a state" in shown
    found = json.loads(run("recommend", folder, "--json").stdout)
    tokens, plan = sum(found["usual"].values()) - found["usual"]["images"], found["plan"]
    assert plan["states_bytes"] > 0
    grown = plan["bytes_per_sequence"] - plan["states_bytes"]
    assert grown == pytest.approx(tokens * found["token_bytes"])


def test_pictures_whose_places_only_the_model_knows(tmp_path: Path) -> None:
    """A config of Kosmos-2 names no placeholder; the forward pass has a mask of them."""
    config = CONFIG_MAPPING["kosmos-2"]()
    config.text_config.layers = 2
    found = json.loads(run("recommend", folder_of(config, tmp_path), "--json").stdout)
    text = config.text_config
    assert found["own_token_bytes"] == 2 * text.layers * text.embed_dim * torch.bfloat16.itemsize


def test_groups_of_its_own_have_a_file_and_no_measured_rows(tmp_path: Path) -> None:
    fields = {"hidden_size": 160, "num_attention_heads": 2, "num_key_value_heads": 1}
    fields |= {"num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 64}
    folder = folder_of(CONFIG_MAPPING["llama"](**fields), tmp_path / "model")
    shown = words_of(folder, "--out", tmp_path / "spec.json")
    assert "Loss: not measured in this version." in shown
    assert "--scheme SPEC.json" in shown
    spec = duotone.CacheSpec.from_file(tmp_path / "spec.json")
    assert spec.text.value.group == 16
    assert "must be a new file" in error_of("recommend", folder, "--out", tmp_path / "spec.json")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("t5", "is an encoder-decoder"),
        ("gpt_oss", "no learned sinks"),
        ("blip", "takes pictures, but its config has none of"),
    ],
)
def test_a_refused_model_is_one_of_supports(name: str, why: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[name]()
    if name == "gpt_oss":
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    folder = folder_of(config, tmp_path)
    ours, theirs = run("recommend", folder), run("supports", folder)
    assert ours.exit_code == theirs.exit_code
    said = ours.output.replace("\n", " ")
    assert why in said
    if ours.exit_code == 0:
        refused = json.loads(run("recommend", folder, "--json").stdout)
        assert refused["refused"] in said


def test_a_wrong_budget_is_a_users_error() -> None:
    assert "write 20GB" in error_of("recommend", "--budget", "20")


def test_all_memory_has_rows_of_weights() -> None:
    asked = ("--memory", "1GB", "--weights", "rtn-w4a8", "--reserve", "100MB")
    shown = words_of(*asked)
    assert "sequences in 1.00 GB" in shown
    assert "100.00 MB, as given" in shown
    card = json.loads(run("recommend", *asked, "--json").stdout)["plan"]["card"]
    assert [row["recipe"] for row in card["rows"]] == ["none", "rtn-w4a8"]
