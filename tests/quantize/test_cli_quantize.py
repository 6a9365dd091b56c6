"""`duotone quantize` on a tiny random model and samples of its own, and on the embedded one."""

import json

import pytest
from cli_runs import error_of, run
from PIL import Image

from duotone.weights.methods.recipe import get_recipe

from mquant_setups import quantized, tiny_loaded


@pytest.fixture
def samples(tmp_path):
    """Three questions, with a picture each."""
    rows = []
    for shade in range(3):
        Image.new("RGB", (8, 8), (80 * shade, 10, 10)).save(tmp_path / f"{shade}.png")
        question = {"question": "what is this ?", "answers": ["red"]}
        rows.append(question | {"images": [f"{shade}.png"]})
    return written(tmp_path / "mine.jsonl", rows)


def written(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr("duotone.loading.load", lambda *_, **__: tiny_loaded())


def test_from_samples_to_a_checkpoint(tmp_path, samples, tiny):
    result = run(
        "quantize", "tiny", "-r", "mquant-w8a8", "-c", samples, "-n", 2, "-o", tmp_path / "q"
    )
    assert result.exit_code == 0, result.output
    assert "language" in result.output
    header = json.loads((tmp_path / "q" / "duotone_weights.json").read_text())
    assert header["recipe"]["split"] == "eq8"
    assert header["calibration"]["sources"][0]["samples"] == 2
    assert header["base"]["name"] == tiny_loaded().name
    assert not (tmp_path / "q.partial").exists()


def test_parts_that_are_not_named_stay_16_bit(tmp_path, samples, tiny):
    common = ("-r", "rtn-w8a8", "-c", samples, "-n", 2, "-o", tmp_path / "q")
    result = run("quantize", "tiny", *common, "--part", "language", "--part", "projector")
    assert result.exit_code == 0, result.output
    modules = json.loads((tmp_path / "q" / "duotone_weights.json").read_text())["modules"]
    assert {name.split(".")[1] for name in modules} == {"language_model", "multi_modal_projector"}


def test_rules_and_files_of_recipes_are_taken(tmp_path, samples, tiny):
    path = tmp_path / "mine.json"
    path.write_text(get_recipe("mquant-head8-w4a8").to_json())
    given = ("-c", samples, "-n", 2, "-o", tmp_path / "q", "--rule", "vision/*:bits=8,clip=false")
    result = run("quantize", "tiny", "-r", path, *given, "--rule", "mlp_output:activation=dynamic")
    assert result.exit_code == 0, result.output
    header = json.loads((tmp_path / "q" / "duotone_weights.json").read_text())
    assert [rule["linears"] for rule in header["recipe"]["rules"]] == ["head", "*", "mlp_output"]
    modules = header["modules"]
    vision = {m["bits"] for path, m in modules.items() if "vision" in path and "bits" in m}
    assert vision == {8}
    assert modules["lm_head"]["bits"] == 8
    down = modules["model.language_model.layers.0.mlp.down_proj"]
    assert (down["bits"], down["activation"]) == (4, "dynamic")


def test_bad_input_is_refused_before_any_work(tmp_path, samples, tiny):
    blind = written(tmp_path / "blind.jsonl", [{"question": "is this ?", "answers": ["no"]}] * 3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    cases = [
        (("-r", "mquant-w3"), "a recipe must be one of"),
        (("-c", blind), "needs pictures to calibrate on"),
        (("-n", 9), "samples must be between 1"),
        (("-o", tmp_path / "full"), "needs a new or empty folder"),
        (("-c", "nothing"), "a task must be one of"),
        (("--format", "gguf"), "--format must be one of"),
        (("--part", "audio"), "a recipe's parts must be some of"),
        (("--rule", "mlp_output"), "a rule is [PART/]LINEARS:FIELD=VALUE"),
        (("--rule", "*.fc3:bits=8"), "a rule must cover a linear of its parts"),
        (("-r", tmp_path / "none.json"), "none.json"),
        (("--format", "compressed-tensors"), "expresses W8A8, W4A16 and dynamic W4A8"),
    ]
    for arguments, message in cases:
        # A second -c adds to the first.
        given = ("quantize", "tiny", "-c", samples, "-n", 2, "-o", tmp_path / "q", *arguments)
        assert message in error_of(*given)
        assert not (tmp_path / "q").exists()
        assert not (tmp_path / "q.partial").exists()


def test_models_that_cannot_be_quantized_are_refused_before_any_work(
    tmp_path, samples, monkeypatch
):
    unknown, done = tiny_loaded(), quantized("rtn-w8a8")[0]
    unknown.model.config.model_type = "newcomer"
    odd = tiny_loaded()
    monkeypatch.setattr("duotone.weights.equivalences.hadamard.SMALLEST_BLOCK", 10**6)
    monkeypatch.setattr("duotone.weights.equivalences.hadamard.exact_plan", lambda size: None)
    cases = [
        (unknown, (), "no module map is known"),
        (done, (), "is quantized already"),
        (odd, ("--no-pad",), "no Hadamard transform covers"),
    ]
    for loaded, arguments, message in cases:
        monkeypatch.setattr("duotone.loading.load", lambda *_, loaded=loaded, **__: loaded)
        given = ("quantize", "m", "-c", samples, "-n", 2, "-o", tmp_path / "q", *arguments)
        assert message in error_of(*given)
        assert not list(tmp_path.glob("q*"))


def test_evaluation_on_calibration_data_is_refused(tmp_path, samples, tiny, monkeypatch):
    from duotone.quantize import calibration_set, quantize_model
    from duotone.tasks import get_task
    from duotone.weights.methods.recipe import get_recipe

    loaded = tiny_loaded()
    quantize_model(
        loaded.model, get_recipe("rtn-w8a8"), calibration_set(loaded, [get_task(str(samples))], 2)
    )
    monkeypatch.setattr("duotone.loading.load", lambda *_, **__: loaded)
    assert "got 2 samples in both: row-1" in error_of("evaluate", samples, "--model", "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["rtn-w8a8", "static-msq-aifs-w4a8"])
def test_the_embedded_model_answers_after_quantization(tmp_path, recipe):
    common = ("--device", "cpu")
    made = run("quantize", "-r", recipe, "-n", 1, "-o", tmp_path / "q", *common)
    assert made.exit_code == 0, made.output
    result = run("evaluate", "documents", "-n", 2, "--model", tmp_path / "q", "--json", *common)
    assert result.exit_code == 0, result.output
    scores = json.loads(result.stdout)
    assert scores["16-bit"]["metrics"]["anls"]["value"] > 0.4
