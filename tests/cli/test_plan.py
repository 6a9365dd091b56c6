"""`duotone plan`, and sizes as people write them."""

import json
import re

import pytest
from cli_runs import error_of, run
from shrunk import tiny_config

import duotone
from duotone.cli.card import parse_bytes
from duotone.cli.common import megabytes, show_paths
from duotone.defaults import CONVERSATIONS, TEXT, name_of
from duotone.hf.weights.checkpoint import save
from duotone.quant.schemes import named
from tiny_vlm import tiny_model

from families import config_of
from families import tiny_model as tiny_family
from mquant_setups import quantized


@pytest.fixture
def config_folder(tmp_path):
    tiny_model().config.save_pretrained(tmp_path)
    return tmp_path


def test_plan_says_how_many_sequences_fit(config_folder):
    asked = ("plan", "--config", config_folder / "config.json", "--visual-tokens", 4096)
    asked += ("--text-tokens", 100, "--new-tokens", 28, "--budget", "1GB", "--scheme", "minmax")
    data = json.loads(run(*asked, "--json").stdout)
    token_bytes = 2 * 3 * 2 * 16 * 2  # K and V, layers, kv heads, head_dim, bytes
    assert data["dense_max_batch"] == 10**9 // (4224 * token_bytes)
    assert data["max_batch"] > 10 * data["dense_max_batch"]
    table = run(*asked)
    assert table.exit_code == 0, table.output
    assert f"{data['max_batch']:,} sequences fit into 1.00 GB" in " ".join(table.stdout.split())


def test_without_a_scheme_it_is_the_recommended_one(tmp_path):
    assert json.loads(run("plan", "--json").stdout)["scheme"] == CONVERSATIONS
    assert json.loads(run("plan", "--bits", 1, "--json").stdout)["scheme"] == name_of(CONVERSATIONS)
    tiny_family("llama").config.save_pretrained(tmp_path)
    of_text = json.loads(run("plan", "--model", tmp_path, "--json").stdout)
    assert of_text["scheme"] == TEXT
    assert duotone.CacheSpec.from_dict(of_text["spec"]) == named(TEXT)


def test_a_plan_of_a_small_budget_says_what_fits(config_folder):
    asked = ("plan", "--config", config_folder, "--scheme", "minmax", "--budget")
    size = json.loads(run(*asked, "1GB", "--json").stdout)["bytes_per_sequence"]
    for times, said in (
        (0.5, "Not one sequence fits into"),
        (1.5, "1 sequence fits into"),
        (2.5, "2 sequences fit into"),
    ):
        shown = " ".join(run(*asked, f"{int(times * size)}B").stdout.split())
        assert said in shown
        assert ("instead of none" in shown) == (times > 1)


def test_windows_of_the_models_own_are_a_part_of_a_plan(tmp_path):
    tiny_family("gemma3").config.save_pretrained(tmp_path)
    shown = run("plan", "--model", tmp_path, "--scheme", "kivi").stdout
    bytes_of = dict(re.findall(r"of it ([a-z ]+?) +│ +│ (\d+\.\d+ \w+) ", shown))
    assert set(bytes_of) == {"codes", "params", "dense", "sliding windows"}
    total = re.search(r"per sequence .* (\d+\.\d+ \w+) ", shown)[1]
    assert sum(map(parse_bytes, bytes_of.values())) == pytest.approx(parse_bytes(total), rel=1e-2)
    assert "windows" not in run("plan", "--scheme", "kivi").stdout


def test_states_and_pictures_of_the_models_own_are_parts_of_a_plan(tmp_path):
    def shown(config, *asked):
        folder = tmp_path / config.model_type
        config.save_pretrained(folder)
        asked = ("plan", "--model", folder, "--scheme", "kivi", *asked)
        data = json.loads(run(*asked, "--json").stdout)
        said = " ".join(run(*asked).stdout.split())
        parts = ("codes", "params", "dense", "windows", "states", "pictures")
        known = [data[f"{part}_bytes"] or 0 for part in parts]
        assert data["bytes_per_sequence"] == sum(known)
        return data, said

    data, said = shown(config_of("qwen3_5"))
    assert f"of it states │ │ {megabytes(data['states_bytes'])}" in said
    assert "Not counted" not in said
    one, said = shown(tiny_config("mllama"))
    assert f"of it pictures │ │ {megabytes(one['pictures_bytes'])}" in said
    none, two = (shown(tiny_config("mllama"), "--images", n)[0] for n in (0, 2))
    assert (none["pictures_bytes"], two["pictures_bytes"]) == (0, 2 * one["pictures_bytes"])
    data, said = shown(tiny_config("qwen4_exp"))
    assert data["states_bytes"] is None
    assert f"Not counted: {data['uncounted']}." in said


def test_a_plan_knows_of_the_images():
    asked = ("plan", "--model", "internvl2.5-8b", "--visual-tokens", 8192, "--json", "--images")
    one, many = (json.loads(run(*asked, images).stdout) for images in (1, 32))
    assert many["bytes_per_sequence"] > one["bytes_per_sequence"]
    assert many["dense_equivalent_bytes"] == one["dense_equivalent_bytes"]


def test_a_plan_says_what_decodes_which_tokens(config_folder):
    asked = ("plan", "--model", "internvl2.5-8b", "--scheme")
    fast = json.loads(run(*asked, "duotone-mixed", "--json").stdout)["attention"]
    assert {"visual", "text", "dense"} <= {p["tokens"] for p in fast}
    assert {(p["runs"], p["why"]) for p in fast} == {("cuda", None)}
    shown = run(*asked, "duotone-mixed").stdout
    assert "decode attention of text tokens runs by the CUDA kernels" in shown
    slow = " ".join(run("plan", "--model", config_folder, "--scheme", "kivi").stdout.split())
    assert "of text tokens runs by Triton, 5 to 20 times slower than the CUDA kernels" in slow
    assert "because query must be" not in slow
    assert "groups along channels must be 32, 64 or 128 and divide 16" in slow


def test_layers_with_another_way_are_named(capsys):
    why = {"tokens": "dense", "runs": "triton", "why": "x"}
    fast = {"tokens": "dense", "runs": "cuda", "why": None}
    show_paths([{**why, "layers": [0, 1, 2, 5]}, {**fast, "layers": [3, 4]}])
    said = capsys.readouterr().out
    assert "tokens of layers 0-2, 5 runs by Triton" in said
    assert "tokens of layers 3-4 runs by the CUDA kernels" in said
    show_paths([{**why, "runs": "reference", "layers": [0]}])
    assert "dense tokens runs by PyTorch operations, slower" in capsys.readouterr().out


def test_plan_refuses_what_it_cannot_plan(config_folder, tmp_path):
    asked = ("plan", "--model", config_folder)
    assert "a scheme must be among" in error_of("plan", "--scheme", "")
    assert "write 30GB, or 30B" in error_of(*asked, "--budget", "30")
    assert "10 images of 9 visual tokens" in error_of(*asked, "--visual-tokens", 9, "--images", 10)
    assert "write e.g. 30GB" in error_of(*asked, "--budget", "much")
    assert "folder with a config.json" in error_of("plan", "--model", "./nowhere")


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("30GB", 30 * 10**9),
        ("1.5 gib", 3 * 2**29),
        ("512B", 512),
        ("2000000", 2_000_000),
        ("20kB", 20_000),
    ],
)
def test_parse_bytes(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("999999", "at least 1,000,000, got '999999'; write 999999GB, or"),
        *((text, r"write e\.g\. 30GB") for text in ("30 apples", "-1GB", "", "0GB", "GB")),
    ],
)
def test_parse_bytes_refuses(text, message):
    with pytest.raises(ValueError, match=message):
        parse_bytes(text)


def test_a_plan_of_all_memory_has_rows_of_weights():
    asked = ("plan", "--memory", "100MB", "--weights", "rtn-w4a8", "--scheme", "duotone")
    card = json.loads(run(*asked, "--json").stdout)["card"]
    own, recipe = card["rows"]
    assert [own["recipe"], recipe["recipe"]] == ["none", "rtn-w4a8"]
    shown = " ".join(run(*asked).stdout.split())
    assert "10.00 MB, assumed, not measured; --reserve sets it" in shown
    said = f"{recipe['max_batch']:,} sequences fit into 100.00 MB instead of"
    assert f"{said} {own['dense_max_batch']:,}." in shown
    tight = " ".join(run("plan", "--memory", "10MB", "--reserve", "2MB").stdout.split())
    assert "do not fit into the 8.00 MB" in tight
    assert "2.00 MB, as given" in tight


def test_memory_options_that_exclude_each_other_are_refused():
    for command in ("plan", "recommend"):
        assert "got both" in error_of(command, "--memory", "1GB", "--budget", "1GB")
        assert "did you mean rtn" in error_of(command, "--memory", "1GB", "--weights", "rtn")
        assert "add memory_bytes (--memory" in error_of(command, "--reserve", "1GB")
    said = error_of("plan", "--model", "internvl2.5-8b", "--memory", "24GB")
    assert "the shape of a cache alone" in said


def test_a_quantized_folder_is_counted_by_its_tensors(tmp_path):
    loaded, report = quantized("mquant-w4a8")
    folder = save(loaded.model, tmp_path / "q")
    for command in ("plan", "recommend"):
        asked = ("--model", folder) if command == "plan" else (folder,)
        found = json.loads(run(command, *asked, "--memory", "10MB", "--json").stdout)
        (row,) = found.get("plan", found)["card"]["rows"]
        assert row["weights_bytes"] == report["bytes"]["after"]["total"]
    # Sizes of queries weigh channels for unequal bits: the folder's weights have no numbers here.
    for scheme in ("duotone@1", "duotone-whole@1"):
        assert run("plan", "--model", folder, "--memory", "10MB", "--scheme", scheme).exit_code == 0
    again = ("plan", "--model", folder, "--memory", "10MB", "--weights", "rtn-w4a8")
    assert "quantized already" in error_of(*again)
