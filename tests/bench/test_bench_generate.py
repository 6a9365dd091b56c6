"""`duotone bench generate`, with tiny models on a CPU."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import cli_runs
import pytest
import torch

import duotone
from duotone.bench import generate_rows
from duotone.bench.generate import Bench, Load, Subject, summary
from duotone.bench.generate_rows import Row, parse_rows
from duotone.bench.generate_watch import FEWEST_TOKENS, Watch
from duotone.bench.questions import LENGTHS, question_ms
from duotone.cli.bench_subject import _calibrated
from duotone.defaults import PICTURES
from duotone.inference.random_models import random_model, random_prompt

from families import tiny_model

CPU = torch.device("cpu")
SMALL = ("--device", "cpu", "--tokens", "40", "--new-tokens", "24", "--calls", "2")
TINY = ("--model", "tiny", *SMALL)


run = partial(cli_runs.run, "bench", "generate")
error_of = partial(cli_runs.error_of, "bench", "generate")


def rows(*names: str) -> list[str]:
    return [part for name in names for part in ("--row", name)]


def measured(*arguments: object) -> dict:
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def tiny() -> Subject:
    model = random_model("tiny", CPU, torch.float32)
    return Subject("tiny", model, random_prompt("tiny", model, 1, 40))


def test_rows_are_measured_and_written(tmp_path: Path) -> None:
    out, names = tmp_path / "new/b1.json", ("plain", "kivi@2, no graphs", "duotone@1")
    done = run(*TINY, *rows(*names), "--out", out)
    assert done.exit_code == 0, done.output
    assert "without a GPU" in done.output
    result = json.loads(out.read_text())
    assert [row["row"] for row in result["rows"]] == list(names)
    assert result["prompt_tokens"] == 40
    assert [result[name] for name in ("q_heads", "kv_heads", "layers")] == [4, 2, 2]
    assert result["left_out"] == ["peak_bytes", "graphs"]
    assert {"created", "commit", "versions", "device"} <= set(result)
    for row in result["rows"]:
        assert 0 < row["ms_per_token"] <= row["longest_ms"]
        assert row["tokens_per_s"] == pytest.approx(1e3 / row["ms_per_token"])
        assert row["answer_tokens"] == 24
        assert row["peak_bytes"] is None
        assert [call["tokens"] for call in row["calls"]] == [24, 24]
    specs = [duotone.CacheSpec.from_dict(row["spec"]) for row in result["rows"][1:]]
    assert specs == [duotone.scheme("kivi", bits=2), duotone.scheme("duotone", bits=1)]
    assert "spec" not in result["rows"][0]
    plain, _, ours = (row["cache_bytes"] for row in result["rows"])
    assert plain == 2 * 2 * 2 * 16 * 4 * (40 + 23)  # layers, K and V, heads, head_dim, fp32
    assert 0 < ours < plain
    assert result["rows"][2]["cache_bytes_16_bit"] == plain


def test_a_static_cache_on_a_cpu_is_said_not_to_be_compiled() -> None:
    (static,) = measured(*TINY, *rows("StaticCache, compiled"))["rows"]
    assert static["notes"] == ["not compiled: generate compiles on a GPU"]


def test_weights_are_quantized_for_the_rows_that_ask_for_it() -> None:
    names = ("plain, rtn-w8a8", "plain", "calibrated@1", "calibrated@1, rtn-w8a8")
    result = measured(*TINY, *rows(*names))
    assert result["weights"] == "16 bit"
    assert [(row["row"], row["weights"]) for row in result["rows"]] == [
        ("plain", "16 bit"),
        ("calibrated@1", "16 bit"),
        ("plain, rtn-w8a8", "rtn-w8a8"),
        ("calibrated@1, rtn-w8a8", "rtn-w8a8"),
    ]


def test_random_bases_are_for_random_weights() -> None:
    (row,) = measured(*TINY, *rows("calibrated@1"))["rows"]
    assert row["cache_bytes"] < row["cache_bytes_16_bit"]
    asked = ("--model", "duotone-tiny", *SMALL, *rows("calibrated@1"))
    assert "for a model of random weights" in error_of(*asked)


def test_text_is_calibrated_beside_pictures(tmp_path: Path) -> None:
    model = random_model("tiny", CPU, torch.float32)
    made = _calibrated(model, tmp_path)
    pictures, both = made("calibrated@1"), made("calibrated, text@2")
    assert pictures.text == "dense"
    assert both.visual.key.classes == pictures.visual.key.classes
    assert (both.text.key.group, both.sink, both.recent) == (64, 4, 32)
    assert both is made("calibrated, text@2")
    (row,) = measured(*TINY, *rows("calibrated, text@2, no graphs"))["rows"]
    assert row["cache_bytes"] < row["cache_bytes_16_bit"]


def test_a_text_model_has_no_row_of_both(tmp_path: Path) -> None:
    tiny_model("llama").config.save_pretrained(tmp_path)
    asked = ("--model", tmp_path / "config.json", *SMALL, *rows("calibrated, text@2"))
    failed = run(*asked)
    assert failed.exit_code == 1
    assert "text beside pictures needs a model with pictures, got 'llama'" in failed.stdout


def test_bytes_of_a_plain_cache_have_states_and_windows(tmp_path: Path) -> None:
    for family in ("lfm2", "cohere2"):
        plain, packed = _of_config(tmp_path, family)["rows"]
        assert plain["cache_bytes"] == packed["cache_bytes_16_bit"]


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "lfm2", "internvl"])
def test_a_question_comes_after_the_last_answer(family: str, tmp_path: Path) -> None:
    """Also where positions, windows or states are not a plain cache's."""
    for row in _of_config(tmp_path, family)["rows"]:
        assert row["notes"] == []
        assert len(row["question_ttfts_ms"]) == 3
        assert row["question_ttft_ms"] == sorted(row["question_ttfts_ms"])[1] > 0


def test_questions_go_on_with_the_rows_cache(tiny: Subject, monkeypatch) -> None:
    """Padding stays hidden, and only the question's tokens are new."""
    inputs = random_prompt("tiny", tiny.model, 2, 40)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :7] = 0
    made = tiny.model.generate(
        **inputs | {"attention_mask": mask}, max_new_tokens=2, return_dict_in_generate=True
    )
    steps, plain = [], type(tiny.model).forward

    def forward(self, **given):
        steps.append((given["input_ids"].shape[1], given["attention_mask"].sum(-1).tolist()))
        return plain(self, **given)

    monkeypatch.setattr(type(tiny.model), "forward", forward)
    assert len(question_ms(tiny.model, made, mask)) == len(LENGTHS)
    whole, expected = 42, []
    for n in LENGTHS:  # the last token of every answer is not in the cache yet
        whole += n
        expected.append((n + 1, [whole - 7, whole]))
        whole += 1
    assert steps == expected


def test_a_cache_that_cannot_go_on_says_why(tiny: Subject, monkeypatch) -> None:
    def fails(*given: object) -> None:
        raise RuntimeError("no more")

    monkeypatch.setattr("duotone.bench.generate.question_ms", fails)
    row = Bench(tiny, Load(1, 40, 24, calls=2)).row(Row.parse("plain"))
    assert row["notes"] == ["no question after the answer: RuntimeError: no more"]
    assert "question_ttft_ms" not in row


def test_heads_that_vary_by_layer_are_of_the_first_packed_one(tmp_path: Path) -> None:
    found = _of_config(tmp_path, "gemma4")
    layers = tiny_model("gemma4").config.get_text_config().per_layer_config
    own, packed = (layers[at].num_key_value_heads for at in (0, 1))
    assert found["kv_heads"] == packed != own


def _of_config(folder: Path, family: str) -> dict:
    tiny_model(family).config.save_pretrained(folder)
    given = ("--model", folder / "config.json", *SMALL)
    return measured(*given, *rows("plain", "kivi@2"))


def test_a_spec_is_two_rows_beside_plain(tmp_path: Path) -> None:
    spec = tmp_path / "mine.json"
    spec.write_text(json.dumps(duotone.scheme("kivi", bits=4).to_dict()))
    result = measured(*TINY, "--spec", "kivi@2", "--spec", spec)
    assert [row["row"] for row in result["rows"]] == [
        "plain",
        "kivi@2",
        "kivi@2, no graphs",
        f"{spec}",
        f"{spec}, no graphs",
    ]
    two, four = (result["rows"][at]["cache_bytes"] for at in (1, 3))
    assert 0 < two <= four


@pytest.mark.slow
def test_a_folder_is_measured_with_noise_for_pictures_and_padding() -> None:
    arguments = ("--model", "duotone-tiny", *SMALL, "--batch", 2, "--padded")
    result = measured(*arguments, *rows("plain", "duotone@1"))
    assert all(row["ms_per_token"] > 0 for row in result["rows"])
    assert result["load"]["padded"]


def test_a_configuration_is_enough(tmp_path: Path) -> None:
    random_model("tiny", CPU, torch.float32).config.save_pretrained(tmp_path)
    result = measured("--model", tmp_path / "config.json", *SMALL, *rows("plain", "duotone@1"))
    plain, ours = result["rows"]
    assert result["prompt_tokens"] == 40
    assert ours["cache_bytes"] < plain["cache_bytes"]  # a mask says what is visual


def test_a_configuration_may_have_short_pictures(tmp_path: Path) -> None:
    random_model("tiny", CPU, torch.float32).config.save_pretrained(tmp_path)
    given = ("--model", tmp_path / "config.json", *SMALL, *rows("duotone@1"))
    whole, short = (measured(*given, *more) for more in ((), ("--picture-tokens", 5)))
    assert [whole["load"]["picture_tokens"], short["load"]["picture_tokens"]] == [None, 5]
    ours, theirs = (result["rows"][0]["cache_bytes"] for result in (short, whole))
    assert ours > theirs  # each has parameters of its own


def test_rows_that_fail_say_so_and_others_stay(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(row: Row) -> dict:
        return {"cache_implementation": "quantized", "cache_config": {"backend": "nobody's"}}

    monkeypatch.setattr(
        Row, "settings", lambda row: broken(row) if row.base == generate_rows.NO_CUDNN else {}
    )
    out = tmp_path / "b1.json"
    done = run(*TINY, *rows(generate_rows.NO_CUDNN, "plain"), "--out", out)
    assert done.exit_code == 1
    failed, plain = json.loads(out.read_text())["rows"]
    assert failed["failed"]
    assert "nobody's" in failed["reason"]
    assert plain["ms_per_token"] > 0


def test_rows_that_begin_late_are_named() -> None:
    result = measured(*TINY, *rows("plain"), "--minutes", "0")
    assert result["rows"] == [
        {"row": "plain", "failed": False, "reason": "the time was over (--minutes)"}
    ]


def test_a_late_row_is_cut_and_keeps_its_second_call(tiny: Subject) -> None:
    load = Load(batch=1, tokens=40, new_tokens=200, calls=3, seconds=0.0)
    row = Bench(tiny, load).row(Row.parse("plain"))
    assert [call["tokens"] for call in row["calls"]] == [FEWEST_TOKENS] * 2
    assert "question_ttft_ms" not in row


def test_answers_have_no_end_and_the_models_settings_come_back(tiny: Subject) -> None:
    model, own = tiny.model, tiny.model.generation_config
    own.eos_token_id = list(range(300))
    try:
        row = Bench(tiny, Load(1, 40, 24, calls=2)).row(Row.parse("plain"))
    finally:
        own.eos_token_id = None
    assert row["answer_tokens"] == 24
    assert model.generation_config is own


REFUSED = {
    "an unknown scheme": (rows("nope@1"), "nope"),
    "an unknown row": (rows("plain@fast"), "--row must be"),
    "an unknown recipe": (rows("plain, w3a3"), "--row must be"),
    "plain without graphs": (rows("plain, no graphs"), "goes with a scheme"),
    "a row twice": (("--row", "kivi@2", "--spec", "kivi@2"), "measured once"),
    "two recipes": (rows("plain, rtn-w4a8", "plain, rtn-w8a8"), "quantized once"),
    "few tokens": (("--new-tokens", "10"), "24 new tokens"),
    "an existing file": (("--out", __file__), "--out must be a new file"),
    "a short prompt": (("--tokens", "12"), "--tokens must hold a tile of 16"),
    "pictures of a shape": (("--picture-tokens", "9"), "have their own size"),
    "another file of JSON": (("--model", "mine.json"), "a configuration is a config.json"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_any_work(name: str) -> None:
    more, message = REFUSED[name]
    assert message in error_of(*TINY, *more)


def test_a_scheme_that_does_not_fit_is_refused_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = random_model("tiny", CPU, torch.float32)
    model.config.text_config.save_pretrained(tmp_path)
    monkeypatch.setattr(Bench, "row", lambda *_: pytest.fail("a row was measured"))
    asked = ("--model", tmp_path / "config.json", *SMALL, *rows("plain", "duotone@1"))
    assert "text" in error_of(*asked)
    asked = ("--model", tmp_path / "config.json", *SMALL, *rows("plain"), "--picture-tokens", 9)
    assert "takes pictures" in error_of(*asked)


def test_every_row_of_the_whole_table_is_one() -> None:
    for takes_images in (True, False):
        names = generate_rows.default_rows(takes_images)
        assert [row.name for row in parse_rows(names)] == names
    assert f"{PICTURES}, no graphs" in generate_rows.default_rows(True)


def test_cudnn_is_off_in_its_row_alone() -> None:
    was = torch.backends.cuda.cudnn_sdp_enabled()
    with Row.parse(generate_rows.NO_CUDNN).block(None):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == was


def test_a_static_row_leaves_nothing_compiled_in_the_model() -> None:
    model = SimpleNamespace(_compiled_call=1, _cache=2, other=3)
    with Row.parse(generate_rows.STATIC).block(model):
        pass
    assert vars(model) == {"other": 3}


def test_a_summary_takes_medians_of_warm_calls() -> None:
    def call(ttft: float, early: float, step: float) -> dict:
        steps = [early, *[step] * 15, step, step + 2, step + 1]
        return {"ttft_ms": ttft, "steps_ms": steps, "peak_bytes": int(ttft)}

    calls = [call(900, 500, 50), call(30, 9, 8), call(10, 9, 7)]
    found = summary(calls, batch=4)
    assert found["ttft_ms"] == 20
    assert (found["first_ttft_ms"], found["first_call_step_ms"]) == (900, 500)
    assert (found["ms_per_token"], found["first_ms_per_token"]) == (8, 51)
    assert (found["longest_ms"], found["first_step_ms"]) == (9, 9)
    assert found["tokens_per_s"] == 500
    assert found["answer_tokens_per_s"] == pytest.approx(4e3 * 20 / (10 + 9 + 15 * 7 + 24))
    assert found["peak_bytes"] == 900


def watched(watch: Watch, most: int) -> int:
    """Tokens until the watch stops the answer, at most so many."""
    ids = torch.zeros(2, 1, dtype=torch.long)
    return next((i for i in range(1, most + 1) if watch(ids, None).all()), most)


@pytest.mark.parametrize(("late", "tokens"), [(False, 40), (True, FEWEST_TOKENS)])
def test_a_late_call_ends_with_the_fewest_tokens(late: bool, tokens: int) -> None:
    watch = Watch(CPU, lambda: late)
    assert watched(watch, 40) == tokens == len(watch.times_s)
