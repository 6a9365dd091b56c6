"""`duotone.calibrated`: the command's spec and bases in one call, kept in files."""

import json
import threading
from pathlib import Path

import pytest
import torch
from cli_runs import run
from safetensors.torch import load_file

import duotone
from duotone.calibrate import compare, kept, one_call, whole
from duotone.calibrate.files import files_of
from duotone.calibrate.written import Written
from duotone.loading import Loaded
from duotone.quant.bases import with_files
from tiny_text import LetterTokenizer, text_model
from tiny_vlm import AnyWords, tiny_model

USUAL = {name: getattr(one_call, name) for name in ("usual_samples", "heldout_of")}
CONTEXT, SAMPLES, HELD_OUT = 100, 2, 2
SMALL = ("-n", SAMPLES, "--heldout", HELD_OUT, "--context", CONTEXT, "--device", "cpu")


@pytest.fixture(autouse=True)
def few_samples(monkeypatch):
    """Fewer and shorter samples than a call takes; `SMALL` asks the command for as many."""
    monkeypatch.setattr(one_call, "usual_samples", lambda tasks: SAMPLES)
    monkeypatch.setattr("duotone.calibrate.text.usual_samples", lambda tasks: SAMPLES)
    monkeypatch.setattr(one_call, "heldout_of", lambda asked, tasks: HELD_OUT)
    monkeypatch.setattr(one_call, "Written", lambda: Written(CONTEXT))


@pytest.fixture(scope="module")
def pictured():
    return tiny_model(), AnyWords()


@pytest.fixture(scope="module")
def words():
    return text_model(), LetterTokenizer()


@pytest.fixture
def idle(monkeypatch):
    """A calibration that begins is a failure."""
    monkeypatch.setattr(one_call, "calibration_data", lambda *_, **__: pytest.fail("it began"))


@pytest.fixture
def found_stays(monkeypatch):
    """Presets take no place: specs name bases."""
    monkeypatch.setattr(
        whole, "compare", lambda *given, **asked: compare(*given, **asked | {"keep_found": True})
    )


def by_command(model, processor, folder, monkeypatch, *asked):
    """Files of the command for the same model."""
    folder.mkdir()
    model.config.save_pretrained(folder / "model")
    loaded = Loaded("model", model, processor)
    monkeypatch.setattr("duotone.loading.load", lambda name, device: loaded)
    done = run("calibrate", folder / "model", *SMALL, *asked, "-o", folder / "mine")
    assert done.exit_code == 0, done.output
    return files_of(folder / "mine")


def nameless(file):
    """Spec of a file, its bases named by their file's ending."""
    return with_files(duotone.CacheSpec.from_file(file).to_dict(), lambda name: ends(Path(name)))


def ends(file):
    return file.name.partition(".")[2]


def bytes_of(file):
    return {name: (x.dtype, x.tolist()) for name, x in load_file(file).items()}


def kept_files(root):
    (folder,) = (path for path in root.iterdir())
    return files_of(folder / "calibrated")


@pytest.mark.parametrize(
    ("kind", "given", "asked"),
    [
        ("pictured", {}, ("--text", "calibrated@2")),
        ("pictured", {"text": None, "bits": 1}, ("--bits", 1)),
        ("words", {}, ()),
    ],
    ids=["pictures and text", "pictures", "a text model"],
)
def test_it_is_what_the_command_writes(kind, given, asked, request, tmp_path, monkeypatch):
    model, processor = request.getfixturevalue(kind)
    theirs = by_command(model, processor, tmp_path / "command", monkeypatch, *asked)
    before = torch.get_rng_state()
    spec = duotone.calibrated(model, processor, folder=tmp_path / "call", **given)
    assert torch.equal(torch.get_rng_state(), before)
    ours = kept_files(tmp_path / "call")
    assert spec == duotone.CacheSpec.from_file(ours[".json"])
    assert {kind for kind in ours if ours[kind].exists()} == {
        kind for kind in theirs if theirs[kind].exists()
    }
    for kind in (kind for kind in ours if ours[kind].exists() and "report" not in kind):
        read = bytes_of if kind.endswith("safetensors") else nameless
        assert read(ours[kind]) == read(theirs[kind])
    reports = [json.loads(files[".report.json"].read_text()) for files in (ours, theirs)]
    assert reports[0]["verdict"] == reports[1]["verdict"]
    assert reports[0]["command"].startswith("duotone.calibrated(model, processor, text=")


@pytest.mark.parametrize(("kind", "samples"), [("pictured", 48), ("words", 16)])
def test_samples_are_as_many_as_the_command_takes(kind, samples, request, tmp_path, monkeypatch):
    asked = []

    def noted(*given, **sizes):
        asked.append(sizes)
        raise InterruptedError

    for name, value in ({"calibration_data": noted} | USUAL).items():
        monkeypatch.setattr(one_call, name, value)
    with pytest.raises(InterruptedError):
        duotone.calibrated(*request.getfixturevalue(kind), folder=tmp_path)
    assert asked == [{"samples": samples, "heldout": 8}]
    assert not list(tmp_path.iterdir())


def test_enable_caches_and_plans_take_it(pictured, found_stays, tmp_path, monkeypatch):
    model, processor = pictured
    monkeypatch.chdir(tmp_path)
    spec = duotone.calibrated(model, processor, folder="here")
    monkeypatch.chdir("/")  # paths of bases are absolute
    ids = torch.tensor([[3, 2, *[2] * 15, 4, 5]])
    pixels = torch.zeros(1, 3, 32, 32)
    with duotone.enable(model, spec) as session:
        model.generate(input_ids=ids, pixel_values=pixels, max_new_tokens=4, do_sample=False)
    assert session.memory().total_bytes > 0
    assert duotone.QuantizedCache(model, spec).spec == spec
    assert duotone.plan(model, spec, visual_tokens=64, text_tokens=200).bits_per_element < 16


def test_a_second_call_reads_the_files(pictured, tmp_path, monkeypatch, capsys):
    model, processor = pictured
    monkeypatch.setenv("DUOTONE_CACHE", str(tmp_path))
    spec = duotone.calibrated(model, processor)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("duotone: calibrating internvl without data")
    assert f"; to be kept in {tmp_path}" in said[0]
    assert [line.startswith("duotone: text: ") for line in said] == [False, False, True]
    with duotone.enable(model, spec):
        pass
    monkeypatch.setattr(one_call, "calibration_data", lambda *_, **__: pytest.fail("anew"))
    assert duotone.calibrated(model, processor) == spec
    assert duotone.calibrated(model, AnyWords(), text=2) == spec
    assert not capsys.readouterr().err
    (folder,) = (tmp_path / "calibrated").iterdir()
    assert folder.name.startswith("internvl-")


def test_another_model_processor_or_setting_is_calibrated_anew(words, tmp_path, monkeypatch):
    class Other(LetterTokenizer):
        bos_token_id = 5

    def began(*_, **__):
        raise InterruptedError

    model, tokenizer = words
    duotone.calibrated(model, tokenizer, folder=tmp_path)
    monkeypatch.setattr(one_call, "calibration_data", began)
    duotone.calibrated(model, tokenizer, folder=tmp_path)
    changed = text_model()
    changed.get_decoder().layers[1].mlp.up_proj.weight.data[3, 5] += 1
    monkeypatch.setattr(duotone, "__version__", duotone.__version__)
    for given, kwargs in (
        ((changed, tokenizer), {}),
        ((model, Other()), {}),
        ((model, tokenizer), {"text": 1.5}),
    ):
        with pytest.raises(InterruptedError):
            duotone.calibrated(*given, folder=tmp_path, **kwargs)
    monkeypatch.setattr(duotone, "__version__", "9")
    with pytest.raises(InterruptedError):
        duotone.calibrated(model, tokenizer, folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 1  # exceptions leave nothing


def test_stages_are_followed(words, tmp_path, capsys):
    seen = []
    duotone.calibrated(*words, folder=tmp_path, progress=lambda *now: seen.append(now))
    assert list(dict.fromkeys(name for name, *_ in seen)) == [
        "calibrating",
        "comparing with presets",
    ]
    assert seen[-1][1] == seen[-1][2]
    assert not capsys.readouterr().err


def test_calls_at_the_same_time_keep_one_whole_calibration(words, tmp_path):
    model, tokenizer = words
    both = threading.Barrier(2)
    found, plain = [], one_call.write

    def write(*given):
        both.wait(60)
        return plain(*given)

    def call():
        found.append(duotone.calibrated(model, tokenizer, folder=tmp_path, progress=print))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_call, "write", write)
        # Only the end is in parallel: a model answers one call at a time.
        turns = threading.Lock()
        end = one_call._end

        def one_by_one(*given):
            with turns:
                return end(*given)

        patch.setattr(one_call, "_end", one_by_one)
        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found[0] == found[1]
    assert kept_files(tmp_path)[".json"].exists()


def refused(*given, **kwargs):
    with pytest.raises(ValueError, match=r"got |must lie in|Calibrate the model before") as error:
        duotone.calibrated(*given, **kwargs)
    return str(error.value)


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        ("pictured", {"text": "calibrated@2"}, "text must be code bits per number, or None; got"),
        ("pictured", {"bits": True}, "bits must be code bits per number, or None; got True"),
        ("pictured", {"text": 9}, "bits per channel must lie in"),
        ("pictured", {"bits": 0.0}, "bits per channel must lie in"),
        ("words", {"text": None}, "a text model has bits of text alone; got text=None"),
        ("words", {"bits": 1.0}, "got text=2.0 and bits=1.0 for 'llama'. Give text=2.0"),
    ],
)
def test_bits_that_do_not_fit_are_refused(kind, given, said, request, tmp_path, idle):
    found = request.getfixturevalue(kind)
    assert said in refused(*found, folder=tmp_path / "kept", **given)
    assert not (tmp_path / "kept").exists()


def test_a_processor_must_be_the_models(pictured, words, tmp_path, idle):
    (model, processor), (text, tokenizer) = pictured, words
    for given, said in (
        ((model,), "must come with its processor, which encodes made-up ones; got 'internvl'"),
        ((model, tokenizer), "for 'internvl', as its AutoProcessor does; got a LetterTokenizer"),
        ((text, "a/folder"), "must be its tokenizer; got a str"),
        ((processor, model), "model must be a transformers model; got a AnyWords"),
    ):
        assert said in refused(*given, folder=tmp_path)


def test_pictures_must_have_tokens_of_the_model(pictured, tmp_path, idle):
    class Blind(AnyWords):
        def _encode(self, conversation):
            ids, pixels = super()._encode(conversation)
            return [5 if token == 2 else token for token in ids], pixels

    assert "no visual tokens of this model" in refused(pictured[0], Blind(), folder=tmp_path)


def test_a_text_model_may_go_without_a_tokenizer(words, tmp_path):
    assert duotone.calibrated(words[0], folder=tmp_path).visual == "text"


def test_models_that_do_not_run_as_in_use_are_refused(words, tmp_path, idle):
    model, tokenizer = words
    with duotone.enable(model):
        assert "with an open block. Call before the block" in refused(model, folder=tmp_path)
    model.train()
    assert "with training mode. Call model.eval()" in refused(model, folder=tmp_path)
    model.eval()
    empty = text_model().to("meta")
    assert "with some on meta. Load it whole" in refused(empty, tokenizer, folder=tmp_path)


def test_quantized_weights_are_refused(tmp_path, idle):
    model = text_model()
    model.get_decoder().layers[1].self_attn.o_proj.to(torch.float8_e4m3fn)
    said = refused(model, LetterTokenizer(), folder=tmp_path)
    assert "of torch.float8_e4m3fn. Calibrate the model before its weights are quantized" in said


def test_a_folder_must_be_one_that_can_be_written(words, tmp_path, monkeypatch, idle):
    (tmp_path / "file").write_text("")
    said = refused(*words, folder=tmp_path / "file" / "kept")
    assert "folder must be one that can be written, got" in said
    assert "Give another one: duotone.calibrated(model, processor, folder=...)" in said
    monkeypatch.setattr(kept, "user_folder", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert "got the user's own: no home" in refused(*words)


@pytest.mark.parametrize("harm", ["a spec is gone", "bases are gone", "bases are damaged"])
def test_a_damaged_calibration_is_refused(harm, words, found_stays, tmp_path, monkeypatch):
    duotone.calibrated(*words, folder=tmp_path)
    files = kept_files(tmp_path)
    if harm == "a spec is gone":
        files[".json"].unlink()
    if harm == "bases are gone":
        files[".safetensors"].unlink()
    if harm == "bases are damaged":
        files[".safetensors"].write_bytes(b"x" + files[".safetensors"].read_bytes()[1:])
    monkeypatch.setattr(one_call, "calibration_data", lambda *_, **__: pytest.fail("it began"))
    said = refused(*words, folder=tmp_path)
    assert "a kept calibration must be whole and of this model; got" in said
    assert "Remove this folder, and call again." in said
