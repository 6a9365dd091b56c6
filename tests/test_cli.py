import json
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import duotone
from duotone.cli import app
from duotone.cli.common import megabytes
from duotone.cli.plan import parse_bytes
from duotone.loading import Loaded
from tiny_text import LetterTokenizer, text_model
from tiny_vlm import TinyProcessor, tiny_model

COMMANDS = ("compare", "generate", "schemes", "evaluate", "plan", "report")


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def error_of(*arguments):
    """The message of a command that must fail as a user error: exit 2, one line, no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def tiny(monkeypatch):
    loaded = Loaded("tiny", tiny_model(), TinyProcessor())
    monkeypatch.setattr("duotone.loading.load", lambda name, device: loaded)
    return loaded


@pytest.fixture
def words_only(monkeypatch):
    loaded = Loaded("words", text_model(), LetterTokenizer())
    monkeypatch.setattr("duotone.loading.load", lambda name, device, **options: loaded)
    return loaded


@pytest.fixture
def picture(tmp_path):
    path = tmp_path / "noise.png"
    Image.effect_noise((32, 32), 90).save(path)
    return path


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_an_example(command):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"duotone {command}" in result.output
    assert "--json" in result.output


def test_the_command_line_is_lean():
    heavy = {"torch", "transformers", "triton"}
    code = f"import duotone.cli, sys; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_version_is_the_packages():
    assert run("--version").output == f"duotone {duotone.__version__}\n"


def test_python_dash_m_runs_it():
    command = [sys.executable, "-m", "duotone", "schemes", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    listed = json.loads(done.stdout)
    assert set(listed) == set(duotone.schemes())
    assert duotone.CacheSpec.from_dict(listed["kivi"]["spec"]) == duotone.scheme("kivi")


def test_schemes_lists_every_scheme():
    output = run("schemes").output
    assert all(name in output for name in duotone.schemes())


def test_compare_shows_both_answers_and_a_sentence(tiny, picture):
    asked = ("--image", picture, "-q", "what is this ?", "-q", "how many red ?")
    result = run("compare", *asked, "--scheme", "minmax", "--max-new-tokens", 5)
    assert result.exit_code == 0, result.output
    for part in ("noise.png", "16-bit answer", "1-bit answer", "time per token (cpu"):
        assert part in result.stdout
    assert "of 2 answers are word for word the same." in " ".join(result.stdout.split())


def test_compare_shows_two_schemes_beside_each_other(tiny, picture):
    asked = ("compare", "-i", picture, "-q", "what is this ?", "-s", "dense", "--beside", "minmax")
    shown = run(*asked, "--max-new-tokens", 3).stdout
    assert "dense and minmax" in shown.replace("\n", " ")
    data = json.loads(run(*asked, "--json", "--max-new-tokens", 3).stdout)
    assert (data["scheme"], data["beside"]["scheme"]) == ("dense", "minmax")
    assert data["answers"][0]["reference"] == data["beside"]["answers"][0]["reference"]
    assert "another scheme" in error_of("compare", "-s", "minmax", "--beside", "minmax")


def test_compare_says_only_what_differs_and_no_numbers_of_nothing(tiny, picture):
    """Under a scheme of the whole stream pictures are no spans that could be counted apart."""
    asked = ("compare", "-i", picture, "-q", "what is this ?", "--max-new-tokens", 3)
    shown = run(*asked, "-s", "dense").stdout
    assert "the same" in shown
    assert "pictures' cache" not in shown
    assert "visual number" not in shown


def test_compare_json_is_pure(tiny, picture):
    asked = ("--image", picture, "-q", "what is this ?")
    result = run("compare", *asked, "-s", "minmax", "--bits", 4, "--json", "--max-new-tokens", 3)
    data = json.loads(result.stdout)
    assert data["memory"]["nominal_bits"] == 4
    assert len(data["answers"]) == 1


def test_generate_prints_the_answer_alone_on_stdout(tiny, picture):
    asked = ("generate", "what is this ?", "--image", picture, "--max-new-tokens", 4)
    result = run(*asked)
    assert result.exit_code == 0, result.output
    data = json.loads(run(*asked, "--json").stdout)
    assert result.stdout.strip() == data["answer"] != ""
    assert "true bits per number" in result.stderr
    assert data["memory"]["visual_bits_per_element"] > 1


def test_generate_with_a_text_model_and_a_text_scheme(words_only):
    result = run("generate", "once upon", "--scheme", "kivi", "--max-new-tokens", 3, "--json")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["answer"]) <= 3


def test_evaluate_a_file_of_ones_own(tiny, picture, tmp_path):
    row = {"images": ["noise.png"], "question": "what is this ?", "answers": ["red"]}
    data = tmp_path / "mine.jsonl"
    data.write_text("\n".join([json.dumps(row)] * 3))
    asked = ("evaluate", data, "-s", "minmax", "-b", 1, "-b", 8, "--out", tmp_path / "results")
    result = run(*asked, "--json")
    assert result.exit_code == 0, result.output
    assert list(json.loads(result.stdout)) == ["16-bit", "minmax-1bit", "minmax-8bit"]
    assert len(list((tmp_path / "results").glob("*.json"))) == 3
    table = run(*asked).stdout
    assert "minmax-8bit" in table
    assert "3 samples" in table


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("ids.json", "[[1, 2, 3, 4, 5, 6], [7, 8, 9]]"),
        ("texts.jsonl", '{"text": "once upon"}\n{"text": "a time"}'),
        ("book.txt", "once upon a time there was"),
    ],
)
def test_evaluate_perplexity_of_a_file(words_only, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    asked = ("evaluate", "--task", "perplexity", "--data", tmp_path / name, "--context", 16)
    asked += ("--scheme", "kivi", "--bits", 2, "--out", tmp_path / "results")
    result = run(*asked, "--json")
    assert result.exit_code == 0, result.output
    results = json.loads(result.stdout)
    assert list(results) == ["16-bit", "kivi-2bit"]
    assert results["kivi-2bit"]["metrics"]["perplexity"]["value"] > 1
    assert (results["16-bit"]["samples"], results["16-bit"]["configuration"]["context"]) == (2, 16)
    assert "perplexity, 2 samples" in run(*asked).stdout


def test_an_interrupted_evaluation_says_how_to_go_on(words_only, tmp_path, monkeypatch):
    @contextmanager
    def interrupted(_):
        yield lambda done, total: (_ for _ in ()).throw(KeyboardInterrupt)

    (tmp_path / "text.txt").write_text("once upon a time")
    asked = ("evaluate", "perplexity", "--data", tmp_path / "text.txt", "--out", tmp_path / "out")
    with monkeypatch.context() as patched:
        patched.setattr("duotone.cli.evaluate.progress_bar", interrupted)
        cut = run(*asked)
    (kept,) = (tmp_path / "out").iterdir()
    assert cut.exit_code not in (0, 2)
    assert f"1 finished batch kept in {kept}; the same command goes on there" in cut.stderr
    again = run(*asked)
    assert again.exit_code == 0, again.output
    assert f"going on from {kept}, behind 1 finished batch" in again.stderr
    assert not kept.exists()


def test_evaluate_a_text_task(words_only, tmp_path):
    row = {"question": "how many eggs", "answer": "#### 18"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    asked = ("evaluate", "--task", "gsm8k", "--data", tmp_path / "rows.jsonl")
    result = run(*asked, "--json")
    assert result.exit_code == 0, result.output
    results = json.loads(result.stdout)
    assert list(results) == ["16-bit", "kivi"]
    assert results["kivi"]["metrics"]["exact_match_strict"]["value"] == 0.0


def test_a_text_task_needs_a_scheme_for_text(tiny, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "how many ?", "answer": "#### 18"}))
    assert "quantizes visual tokens only" in error_of(
        "evaluate", "gsm8k", "--data", path, "--scheme", "minmax"
    )
    path.write_text('{"text": "what is this ?"}')
    tiny.processor.tokenizer = LetterTokenizer()
    assert "quantizes text, got 'minmax'" in error_of(
        "evaluate", "perplexity", "--data", path, "--scheme", "minmax"
    )


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


def test_plan_takes_quantized_weights_into_the_time(config_folder):
    asked = ("plan", "--model", config_folder, "--json", "--weights")
    steps = {w: json.loads(run(*asked, w).stdout)["decode"] for w in ("bf16", "w8a8")}
    assert steps["w8a8"]["16-bit"] == steps["bf16"]["16-bit"]
    assert steps["w8a8"]["scheme"]["step_s"] < steps["bf16"]["scheme"]["step_s"]


def test_both_tables_of_a_plan_know_of_the_images():
    asked = ("plan", "--model", "internvl2.5-8b", "--visual-tokens", 8192, "--json", "--images")
    one, many = (json.loads(run(*asked, images).stdout) for images in (1, 32))
    more = many["bytes_per_sequence"] - one["bytes_per_sequence"]
    held = [plan["decode"]["scheme"]["bytes_per_sequence"] for plan in (one, many)]
    assert held[1] - held[0] == more > 0
    assert many["decode"]["16-bit"] == one["decode"]["16-bit"]


def test_plan_refuses_what_it_cannot_plan(config_folder, tmp_path):
    asked = ("plan", "--model", config_folder)
    assert "write 30GB, or 30B" in error_of(*asked, "--budget", "30")
    assert "10 images of 9 visual tokens" in error_of(*asked, "--visual-tokens", 9, "--images", 10)
    assert "bf16" in error_of(*asked, "--weights", "w3a3")
    assert "write e.g. 30GB" in error_of(*asked, "--budget", "much")
    assert "folder with a config.json" in error_of("plan", "--model", "./nowhere")


def test_missing_and_broken_pictures(tiny, tmp_path):
    (tmp_path / "text.png").write_text("no picture")
    assert "existing file" in error_of("compare", "--image", tmp_path / "gone.png")
    assert "image file" in error_of("compare", "--image", tmp_path / "text.png")
    assert "existing file" in error_of("generate", "what?", "--image", tmp_path / "gone.png")


@pytest.mark.parametrize("command", [("compare",), ("generate", "hi"), ("evaluate", "documents")])
def test_unknown_schemes_name_the_nearest(command):
    assert "calibquant" in error_of(*command, "--scheme", "calibqant")


def test_wrong_bits(tiny, picture):
    assert "bits must be one of" in error_of("compare", "-i", picture, "--bits", 5)


def test_questions_need_pictures():
    assert "--question needs a picture" in error_of("compare", "--question", "what?")


def test_a_text_model_under_a_visual_scheme(words_only):
    assert "has no visual tokens" in error_of("generate", "once", "--scheme", "duotone")


def test_a_prompt_without_a_picture_under_a_visual_scheme(tiny):
    assert "without a picture" in error_of("generate", "what is this ?")


def test_pictures_for_a_text_model(words_only, picture):
    asked = ("generate", "what?", "--image", picture, "--scheme", "kivi")
    assert "takes text only" in error_of(*asked)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/model"])
def test_a_model_folder_that_is_none(picture, name):
    assert "folder with a config.json" in error_of("compare", "-i", picture, "--model", name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("captionz",), "did you mean captions"),
        (("gone.jsonl",), "existing JSONL file"),
        (("documents", "--split", "test"), "split must be one of"),
        ((), "one task must be named"),
        (("documents", "--task", "captions"), "one task must be named"),
        (("perplexity",), "add --data FILE"),
        (("perplexity", "--data", "x.json", "--kl"), "--kl does not go with this task"),
        (("documents", "--context", "9"), "only perplexity cuts text"),
        (("documents", "--data", "x.jsonl"), "data belongs to a text task"),
        (("documents", "--dtype", "int8"), "--dtype must be one of"),
    ],
)
def test_evaluate_names_what_is_wrong(arguments, message):
    assert message in error_of("evaluate", *arguments)


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


def test_a_folder_that_cannot_be_written_is_refused_before_any_work(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny.model, "generate", None)
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert "--out must be a folder" in error_of("evaluate", "documents", "--out", out)


def test_debugging_shows_the_traceback(monkeypatch):
    monkeypatch.setenv("DUOTONE_DEBUG", "1")
    assert isinstance(run("compare", "-s", "calibqant").exception, ValueError)


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


@pytest.mark.parametrize("text", ["30", "1.5", "999999"])
def test_a_budget_without_its_unit_is_refused(text):
    with pytest.raises(ValueError, match=rf"at least 1,000,000, got '{text}'; write {text}GB, or"):
        parse_bytes(text)


@pytest.mark.parametrize("text", ["30 apples", "-1GB", "", "0GB", "GB"])
def test_parse_bytes_refuses(text):
    with pytest.raises(ValueError, match=r"write e\.g\. 30GB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("count", "text"), [(1.07e9, "1.07 GB"), (25e6, "25.00 MB"), (1500, "1.50 kB"), (12, "12 B")]
)
def test_megabytes(count, text):
    assert megabytes(count) == text


@pytest.mark.slow
def test_the_demo_on_the_embedded_model():
    data = json.loads(run("compare", "--json").stdout)
    assert len(data["answers"]) >= 10
    assert data["memory"]["visual_bits_per_element"] <= 1.3
    assert data["visual_ratio"] > 12
    assert {"Vera Nuraubrol", "top right"} <= {answer["reference"] for answer in data["answers"]}
