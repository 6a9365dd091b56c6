"""`duotone calibrate` from the command line, on the embedded model with very few samples."""

import inspect
import json
from contextlib import contextmanager

import pytest
from cli_runs import error_of, run
from safetensors.torch import load_file

import duotone
from duotone.calibrate import Settings
from duotone.cli.calibrate import command
from duotone.loading import Loaded
from duotone.models import duotone_tiny_path
from duotone.quant.schemes import named
from tiny_text import LetterTokenizer, text_model
from tiny_vlm import AnyWords, tiny_model

SMALL = ("--task", "documents", "-n", "1", "--heldout", "1", "--device", "cpu")
REFUSED = {
    "an unknown task": (("--task", "nothing"), "a task must be one of"),
    "no samples": ((*SMALL, "-n", "0"), "samples must be between 1"),
    "too many bits": ((*SMALL, "--bits", "9"), "bits per channel must lie in [0.125, 4]"),
    "no bits": ((*SMALL, "--bits", "0"), "bits per channel must lie in [0.125, 4]"),
    "a task twice": ((*SMALL, "--task", "documents"), "tasks must have different names"),
    "a text that is no file": (("--task", "nothing.txt"), "must be an existing file"),
    "text in 16 bit": ((*SMALL, "--text", "duotone@1"), "that quantizes text, got 'dense'"),
    "no scheme": ((*SMALL, "--text", "nothing"), "a scheme must be among"),
    "no bits of text": ((*SMALL, "--text", "calibrated@x"), "has code bits after its @"),
    "too many bits of text": ((*SMALL, "--text", "calibrated@9"), "bits per channel must lie in"),
    "too little text": (
        (*SMALL, "--text", "calibrated", "--context", "20"),
        "packs nothing below 100 tokens",
    ),
    "text without pictures": (
        ("--task", "written", "--text", "calibrated"),
        "text beside pictures needs a model with pictures",
    ),
    "no tensors": (("--task", "nothing.safetensors"), "No such file or directory: nothing"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_any_work(name, tmp_path):
    arguments, message = REFUSED[name]
    assert message in error_of("calibrate", *arguments, "-o", tmp_path / "mine")
    assert not list(tmp_path.iterdir())


def test_existing_files_and_bad_paths_are_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr("duotone.loading.load", lambda *_: pytest.fail("the model was loaded"))
    (tmp_path / "mine.json").write_text("{}")
    for out, message in (("mine", "never overwritten"), ("mine.json/a", "can be written")):
        assert message in error_of("calibrate", *SMALL, "-o", tmp_path / out)


def test_from_samples_to_a_spec_that_other_commands_take(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["/bin/duotone", "calibrate", "-o", "my file"])
    # One sample does not settle which spec is nearer, on every CPU alike.
    asked = ("--bits", "1", "--keep-found", "-o", tmp_path / "mine", "--json")
    result = run("calibrate", *SMALL, *asked)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["header"]["settings"]["bits"] == 1.0
    assert 1 < report["bits"] < 1.2  # what parameters of 8 bits save at spans of 256 tokens
    ends = ("safetensors", "json", "report.json")
    assert report["files"] == [str(tmp_path / f"mine.{end}") for end in ends]
    written = json.loads((tmp_path / "mine.report.json").read_text())
    assert written["verdict"] == report["verdict"]
    assert written["command"] == "duotone calibrate -o 'my file'"
    assert report["verdict"]["kept"] == "calibrated"
    assert report["verdict"]["found"]["packed"] > 0.8
    assert set(report["seconds"]) == {"calibration", "comparison"}
    other = ("documents", "-n", "1", "--device", "cpu", "--out", tmp_path / "results")
    used = run("evaluate", "--scheme", tmp_path / "mine.json", *other)
    assert used.exit_code == 0, used.output


def test_text_and_answers_stand_beside_calibrated_pictures(tmp_path):
    options = ("--heldout", "0", "--text", "duotone-mixed@4", "-o", tmp_path / "mine")
    result = run("calibrate", *SMALL, *options)
    assert result.exit_code == 0, result.output
    assert "Text and answers are as in duotone-mixed@4" in result.stdout
    spec, words = duotone.CacheSpec.from_file(tmp_path / "mine.json"), named("duotone-mixed@4")
    assert (spec.text, spec.sink, spec.recent) == (words.text, words.sink, words.recent)
    assert str(tmp_path / "mine.safetensors") in spec.layers[0].visual.key.transform
    assert json.loads((tmp_path / "mine.report.json").read_text())["text"] == "duotone-mixed@4"


def test_files_are_moved_together(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("calibrate", *SMALL, "--heldout", "0", "-o", "here/mine")
    assert result.exit_code == 0, result.output
    assert "Use it: duotone compare --scheme here/mine.json" in " ".join(result.stdout.split())
    (tmp_path / "here").rename(tmp_path / "there")
    monkeypatch.chdir("/")
    other = ("documents", "-n", "1", "--device", "cpu", "--out", tmp_path / "results")
    used = run("evaluate", "--scheme", tmp_path / "there" / "mine.json", *other)
    assert used.exit_code == 0, used.output


def test_text_and_pictures_are_calibrated_and_moved_together(tiny, tmp_path):
    (tmp_path / "here").mkdir()
    small = ("-n", "2", "--heldout", "2", "--context", "100", "--device", "cpu")
    asked = ("--text", "calibrated@1.5", "--keep-found", "--json")
    result = run("calibrate", tiny, *small, *asked, "-o", tmp_path / "here" / "mine")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    ends = ("safetensors", "text.safetensors", "json", "report.json")
    assert [file.rpartition("/mine.")[2] for file in report["files"]] == list(ends)
    text = report["text"]
    assert (text["scheme"], text["header"]["settings"]["bits"]) == ("calibrated@1.5", 1.5)
    assert text["bits"] == pytest.approx(1.5, abs=0.01)
    assert text["header"]["data"][0]["task"] == "written"
    assert (text["verdict"]["kept"], report["verdict"]["kept"]) == ("calibrated", "calibrated")
    assert text["verdict"]["tasks"] == ["written"]
    assert report["verdict"]["tasks"] == ["made-up"]
    written = json.loads((tmp_path / "here" / "mine.json").read_text())
    assert "mine.text.safetensors#" in json.dumps(written["layers"])
    (tmp_path / "here").rename(tmp_path / "there")
    spec = duotone.CacheSpec.from_file(tmp_path / "there" / "mine.json")
    assert (spec.sink, spec.recent, spec.text.key.group) == (4, 32, 64)
    at = spec.at_layer(1)
    assert at.text.key.transform == f"klt:{tmp_path / 'there' / 'mine.text.safetensors'}#1.key"
    assert at.visual.key.transform == f"klt:{tmp_path / 'there' / 'mine.safetensors'}#1.key"
    assert "never overwritten, got the existing" in error_of(
        "calibrate", tiny, *small, "-o", tmp_path / "there" / "mine"
    )


def test_the_last_lines_say_what_text_has(tiny, tmp_path):
    small = ("-n", "2", "--heldout", "2", "--context", "100", "--device", "cpu")
    result = run("calibrate", tiny, *small, "--text", "calibrated", "-o", tmp_path / "mine")
    assert result.exit_code == 0, result.output
    said = result.stdout.partition("└")[2]
    assert "Text: 2.000 code bits per number, from 200 tokens" in said
    assert "Text: calibrated: KL" in said
    assert "on 2 held-out samples (made-up)" in said
    assert "on 2 held-out samples (written)" in said
    assert f"--scheme {tmp_path / 'mine.json'}" in said
    report = json.loads((tmp_path / "mine.report.json").read_text())
    kept = {report["verdict"]["kept"], report["text"]["verdict"]["kept"]}
    assert (tmp_path / "mine.found.json").exists() == (kept != {"calibrated"})


def test_options_have_the_defaults_of_the_settings():
    options = inspect.signature(command).parameters
    ours = Settings().to_dict()
    shared = ours.keys() & options.keys() - {"text"}  # a scheme's name on the command line
    assert shared == {"bits", "foreground", "regularization", "group", "recent"}
    assert {name: options[name].default for name in shared} == {name: ours[name] for name in shared}


def test_a_text_is_cut_for_the_model_and_its_prompts_counted(tmp_path):
    (tmp_path / "story.txt").write_text("the cat sat on a mat. " * 200)
    options = ("calibrate", "--task", tmp_path / "story.txt", "-n", "2", "--heldout", "0")
    refused = error_of(*options, "--context", "300", "--device", "cpu", "-o", tmp_path / "mine")
    assert "bases of 'duotone-tiny' are of its visual tokens, got 2 prompts" in refused


def test_without_held_out_samples_nothing_is_compared(tmp_path):
    result = run("calibrate", *SMALL, "--heldout", "0", "-o", tmp_path / "mine")
    assert result.exit_code == 0, result.output
    assert "nothing says that this spec beats a preset" in result.stdout
    assert json.loads((tmp_path / "mine.report.json").read_text())["verdict"] is None


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    @contextmanager
    def interrupted(_):
        yield lambda done, total: (_ for _ in ()).throw(KeyboardInterrupt)

    monkeypatch.setattr("duotone.cli.calibrate.progress_bar", interrupted)
    cut = run("calibrate", *SMALL, "-o", tmp_path / "mine")
    assert cut.exit_code not in (0, 2)
    assert not list(tmp_path.iterdir())


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    """Folder of another model than the embedded one, without its weights."""
    model = tiny_model()
    model.config.save_pretrained(tmp_path / "tiny")
    loaded = Loaded("tiny", model, AnyWords())
    monkeypatch.setattr("duotone.loading.load", lambda name, device: loaded)
    return tmp_path / "tiny"


def test_another_model_needs_no_samples(tiny, tmp_path):
    small = ("-n", "4", "--device", "cpu")
    result = run("calibrate", tiny, *small, "-o", tmp_path / "mine")
    assert result.exit_code == 0, result.output
    assert "on 8 held-out samples (made-up)" in result.stdout
    assert f"duotone compare --model {tiny} --scheme {tmp_path / 'mine.json'}" in result.stdout
    report = json.loads((tmp_path / "mine.report.json").read_text())
    (source,) = report["header"]["data"]
    assert (source["task"], source["samples"]) == ("made-up", 4)
    assert source["rows"] == ["made_up-2000000000", "made_up-2000000003"]
    assert source["heldout"]["rows"] == [0, 7]
    named = run("calibrate", tiny, "--task", "made-up", *small, "-o", tmp_path / "named")
    assert named.exit_code == 0, named.output
    files = [tmp_path / f"{name}.safetensors" for name in ("mine", "named")]
    assert bases_of(files[0]) == bases_of(files[1])


def bases_of(file):
    return {name: tensor.tolist() for name, tensor in load_file(file).items()}


def test_a_real_processor_takes_made_up_samples(tmp_path):
    small = ("-n", "1", "--heldout", "0", "--device", "cpu", "--json")
    result = run("calibrate", duotone_tiny_path(), *small, "-o", tmp_path / "mine")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["header"]["data"][0]["task"] == "made-up"


@pytest.fixture
def words(tmp_path, monkeypatch):
    """Folder of a text model, without its weights."""
    model = text_model()
    model.config.save_pretrained(tmp_path / "words")
    loaded = Loaded("words", model, LetterTokenizer())
    monkeypatch.setattr("duotone.loading.load", lambda name, device: loaded)
    return tmp_path / "words"


def test_a_text_model_is_refused_pictures_by_its_config(words, tmp_path, monkeypatch):
    monkeypatch.setattr("duotone.loading.load", lambda *_: pytest.fail("the model was loaded"))
    named = ("--task", "made-up", "-o", tmp_path / "mine")
    refused = error_of("calibrate", words, *named)
    assert "made-up samples are pictures" in refused
    assert (
        "a 'llama' whose tokens are text only. Leave --task out, for text that it writes itself"
        in refused
    )


@pytest.mark.parametrize("text", ["calibrated@2", "duotone-mixed@4"])
def test_a_text_model_has_no_text_beside_pictures(text, words, tmp_path):
    refused = error_of("calibrate", words, "--text", text, "-o", tmp_path / "mine")
    assert "needs a model with pictures" in refused
    assert "whose text is calibrated itself; leave --text out" in refused


def test_a_text_model_writes_its_own_samples(words, tmp_path):
    small = ("-n", "2", "--heldout", "2", "--context", "96", "--device", "cpu")
    result = run("calibrate", words, *small, "-o", tmp_path / "mine")
    assert result.exit_code == 0, result.output
    assert "on 2 held-out samples (written)" in result.stdout
    report = json.loads((tmp_path / "mine.report.json").read_text())
    assert report["header"]["tokens"] == 2 * 96
    (source,) = report["header"]["data"]
    assert (source["task"], source["heldout"]["rows"]) == ("written", [2, 3])
    named = run("calibrate", words, "--task", "written", *small, "-o", tmp_path / "named")
    assert named.exit_code == 0, named.output
    assert bases_of(tmp_path / "mine.safetensors") == bases_of(tmp_path / "named.safetensors")
