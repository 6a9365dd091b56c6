"""`duotone bench generate --budget`, with tiny models on a CPU."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import cli_runs
import pytest
import torch
from replay_double import ReplayDouble, double

from duotone.bench import budget, generate_budget
from duotone.bench.batch_search import MAX_TRIALS, largest_fitting
from duotone.bench.generate import Bench, Load, Subject
from duotone.bench.generate_budget import STEPS, Answers, BudgetBench
from duotone.bench.generate_rows import CALIBRATED, PLAIN, STATIC, Row
from duotone.bench.sequences import Steps, copies, go_on, read
from duotone.calibrate.random_bases import random_bases
from duotone.hf.graphs import decode_steps
from duotone.inference.random_models import SHAPES, random_model, tiled_prompt

from families import tiny_model

__all__ = ["double"]  # a fixture

CPU = torch.device("cpu")
TINY = ("--device", "cpu", "--model", "tiny", "--tokens", "32", "--new-tokens", str(STEPS))
ONE = 2 * 2 * 2 * 16 * 4 * (32 + 128 + STEPS)  # layers, K and V, heads, head_dim, fp32, tokens


run = partial(cli_runs.run, "bench", "generate")
error_of = partial(cli_runs.error_of, "bench", "generate")


def measured(*arguments: object) -> list[dict]:
    done = run(*TINY, *arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model("tiny", CPU, torch.float32)


def prompt(model: Any, text: int = 20) -> tuple[dict, None]:
    return tiled_prompt("tiny", model, 1, 2, text), None


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is collected between trials."""
    for module in (budget, generate_budget):
        monkeypatch.setattr(module, "release", lambda: None)


@pytest.fixture
def bench(model: Any, fast: None) -> BudgetBench:
    subject = Subject("tiny", model, prompt(model)[0])
    prompts = lambda visual, text: prompt(model, text)  # noqa: E731
    return BudgetBench(Bench(subject, Load(1, 52, 24)), prompts, Answers(32, 20, STEPS))


def test_each_budget_has_a_file_that_a_later_run_goes_on_with(tmp_path: Path) -> None:
    budgets = ("--budget", f"{5 * ONE}B,{8 * ONE}B", "--out", tmp_path / "new")
    done = run(*TINY, *budgets, "--row", "plain")
    assert done.exit_code == 0, done.output
    first, second = sorted((tmp_path / "new").iterdir())
    small, large = (json.loads(path.read_text()) for path in (first, second))
    # Which batch is faster is a matter of the machine.
    assert [one["rows"][0]["largest_batch"] for one in (small, large)] == [5, 8]
    assert (small["visual_tokens"], small["prompt_tokens"], small["new_tokens"]) == (32, 128, STEPS)
    row = small["rows"][0]
    batch = row["batch"]
    assert batch in (4, 5)
    assert row["tokens_per_s"] == pytest.approx(1e3 * batch / row["step_ms"])
    seconds = batch * row["read_s"] + STEPS * row["step_ms"] / 1e3
    assert row["answer_tokens_per_s"] == pytest.approx(batch * STEPS / seconds)
    small["rows"].append({"row": "duotone@1", "failed": True, "reason": "cut off"})
    first.write_text(json.dumps({**small, "commit": "another"}))
    done = run(*TINY, *budgets, "--row", "plain", "--row", "duotone@1")
    assert done.exit_code == 0, done.output
    later = json.loads(first.read_text())["rows"]
    assert later[0] == row
    assert [one["row"] for one in later] == ["plain", "duotone@1"]
    assert later[1]["batch"] > 5
    assert later[1]["notes"] == []
    assert later[1]["commit"] == large["commit"]
    assert "commit" not in json.loads(second.read_text())["rows"][1]


def test_rows_of_another_card_do_not_join_a_file(tmp_path: Path) -> None:
    given = ("--budget", f"{3 * ONE}B", "--out", tmp_path, "--row", "plain")
    assert run(*TINY, *given).exit_code == 0
    (path,) = tmp_path.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "device": "another"}))
    assert "have one device" in error_of(*TINY, *given, "--row", "kivi@2")


def test_a_time_limit_ends_between_rows() -> None:
    (result,) = measured("--budget", "4MB", "--minutes", "0")
    assert result["rows"] == []


def test_a_budget_below_one_sequence_has_no_batch() -> None:
    (result,) = measured("--budget", f"{ONE // 2}B", "--row", "plain")
    assert result["rows"][0]["batch"] == 0


def test_a_batch_whose_peak_exceeds_the_budget_does_not_fit(
    bench: BudgetBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def twice(*given: Any, **more: Any) -> Steps:
        steps = go_on(*given, **more)
        return replace(steps, peak_bytes=2 * steps.peak_bytes)

    largest = bench.row(Row.parse(PLAIN), 8 * ONE)["largest_batch"]
    monkeypatch.setattr(generate_budget, "go_on", twice)
    assert bench.row(Row.parse(PLAIN), 8 * ONE)["largest_batch"] == largest // 2


def test_states_are_copied_with_the_tokens(tmp_path: Path) -> None:
    tiny_model("lfm2").config.save_pretrained(tmp_path)
    asked = ("--model", tmp_path / "config.json", "--budget", f"{3 * ONE}B")
    (result,) = measured(*asked, "--row", "plain", "--row", "kivi@2")
    assert all(row["batch"] > 1 for row in result["rows"])


@pytest.mark.slow
def test_weights_are_quantized_once_for_all_budgets() -> None:
    rows = ("--row", f"{CALIBRATED}, rtn-w8a8", "--row", "plain")
    results = measured("--budget", f"{2 * ONE}B,{3 * ONE}B", *rows)
    for result in results:
        found = [(row["row"], row["weights"]) for row in result["rows"]]
        assert found == [("plain", "16 bit"), (f"{CALIBRATED}, rtn-w8a8", "rtn-w8a8")]
        assert all(row["batch"] for row in result["rows"])


def test_a_configuration_is_enough(tmp_path: Path, model: Any) -> None:
    model.config.save_pretrained(tmp_path)
    given = ("--model", tmp_path / "config.json", "--row", "duotone@1")
    done = run(*TINY, *given, "--budget", f"{2 * ONE}B", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)[0]["rows"][0]["batch"] >= 2


REFUSED = {
    "a batch": (("--batch", "2"), "--batch"),
    "padding": (("--padded",), "--padded"),
    "few new tokens": (("--new-tokens", "47"), "at least 48"),
    "half a tile": (("--tokens", "40"), "whole tiles of 16"),
    "a folder": (("--model", "duotone-tiny"), "give a shape or a config.json"),
    "no unit": (("--budget", "30"), "a budget without a unit"),
    "an unknown row": (("--row", "nope@1"), "nope"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_any_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more, message = REFUSED[name]
    monkeypatch.setattr(BudgetBench, "row", lambda *_: pytest.fail("a row was measured"))
    assert message in error_of(*TINY, "--budget", "4MB", *more)


@pytest.mark.parametrize("name", [PLAIN, STATIC, "duotone@1", "duotone-mixed@2"])
def test_copies_go_on_as_the_sequence_does(
    double: type[ReplayDouble], model: Any, name: str
) -> None:
    row, given = Row.parse(name), prompt(model)
    call = {"max_new_tokens": 20, "do_sample": False}
    with row.block(model):
        whole = model.generate(**given[0], **row.settings(), **call)
    one = read(model, row, given)
    with row.block(model):
        ids = one.ids.repeat(3, 1)
        cache = copies(model, row, one, 3, 19)
        mask = torch.ones_like(ids)
        made = model.generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            **call | {"max_new_tokens": 19},
        )
    assert torch.equal(made, whole.expand(3, -1))


def test_steps_of_ours_are_replays(double: type[ReplayDouble], model: Any) -> None:
    for name in ("duotone@1", "duotone-mixed@2"):
        row, before = Row.parse(name), double.replays
        steps = go_on(model, row, read(model, row, prompt(model)), 2, 20, 60)
        assert steps.eager is None
        assert double.replays - before >= 18
        assert len(steps.seconds) == 19


def test_a_calibrated_spec_is_replayed(
    double: type[ReplayDouble], model: Any, tmp_path: Path
) -> None:
    spec = random_bases(model, tmp_path / "bases.safetensors")
    row = Row(CALIBRATED, CALIBRATED, spec)
    steps = go_on(model, row, read(model, row, prompt(model)), 2, 20, 20)
    assert steps.eager is None
    assert double.replays
    layers = [spec.at_layer(layer) for layer in range(2)]
    parts = [(at.visual, spec.foreground) for at in layers]
    parts += [(at.background, 1 - spec.foreground) for at in layers]
    bits = sum(share * (p.key.nominal_bits + p.value.nominal_bits) for p, share in parts) / 4
    assert 0.8 < bits <= 1


def refusing(message: str) -> Callable:
    def capture(body: Callable, device: torch.device) -> None:
        raise RuntimeError(message)

    return capture


def test_a_row_that_is_not_replayed_says_why(
    double: type[ReplayDouble], bench: BudgetBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_steps, "capture", refusing("not permitted when capturing"))
    for size in (2 * ONE, 3 * ONE):  # a warning would come once
        row = bench.row(Row.parse("duotone@1"), size)
        assert row["notes"][-1] == "steps are launched one by one: not permitted when capturing"


def test_a_capture_without_memory_is_a_batch_that_does_not_fit(
    double: type[ReplayDouble], bench: BudgetBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_steps, "capture", refusing("CUDA out of memory. Tried to"))
    assert bench.row(Row.parse("duotone@1"), 2 * ONE)["batch"] == 0


@pytest.mark.parametrize(("whole_s", "is_taken"), [(0.1, True), (0.29, False)])
def test_a_multiple_of_64_is_taken_where_it_is_faster(
    bench: BudgetBench, monkeypatch: pytest.MonkeyPatch, whole_s: float, is_taken: bool
) -> None:
    def fake(model: Any, row: Row, one: Any, batch: int, *_: Any, **__: Any) -> Steps:
        if batch > 150:
            raise torch.OutOfMemoryError("no")
        return Steps((whole_s if batch == 128 else 0.3,) * 40, batch * one.nbytes, None, ())

    monkeypatch.setattr(generate_budget, "go_on", fake)
    row = bench.row(Row.parse("plain"), 160 * 2 * 2 * 2 * 16 * 4 * (32 + 20 + STEPS))
    assert 147 <= row["largest_batch"] <= 150
    assert row["batch"] == (128 if is_taken else row["largest_batch"])


def test_a_cache_that_grows_gets_room_where_that_is_faster(
    bench: BudgetBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(model: Any, row: Row, one: Any, batch: int, *_: Any, **__: Any) -> Steps:
        if batch > 30:
            raise torch.OutOfMemoryError("no")
        return Steps((0.1 if batch > 28 else 0.05,) * 40, batch * one.nbytes, None, ())

    monkeypatch.setattr(generate_budget, "go_on", fake)
    for name, batch in (("plain", 27), ("kivi@2", 30)):
        row = bench.row(Row.parse(name), 33 * 2 * 2 * 2 * 16 * 4 * (32 + 20 + STEPS))
        assert (row["batch"], row["largest_batch"]) == (batch, 30)


def search(limit: int, guess: int, fixed: int = 0, most: int = 10**6) -> tuple[int, int]:
    """(largest batch, trials) where `limit` sequences of 10 bytes fit beside `fixed` bytes."""
    trials = []

    def trial(batch: int) -> dict:
        trials.append(batch)
        if batch > limit:
            raise torch.OutOfMemoryError("no")
        return {"peak_bytes": fixed + 10 * batch}

    found = largest_fitting(trial, guess, most, fixed + 10 * limit, 10)
    return (0 if found is None else found[0]), len(trials)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize("limit", [1, 2, 3, 17, 100, 577])
@pytest.mark.parametrize("share", [0.5, 0.9, 1.0, 1.05, 1.3])
@pytest.mark.parametrize("fixed", [0, 300])
def test_the_largest_batch_is_found_in_a_few_trials(limit: int, share: float, fixed: int) -> None:
    batch, trials = search(limit, round(share * limit), fixed)
    assert 0.97 * limit <= batch <= limit
    assert trials <= MAX_TRIALS
    if 0.9 <= share <= 1.05 and not fixed:
        assert trials <= 4


@pytest.mark.usefixtures("fast")
def test_a_guess_that_is_far_too_large_still_finds_a_batch() -> None:
    assert search(17, 1700)[0] > 0
    assert search(1, 500)[0] == 1


@pytest.mark.usefixtures("fast")
def test_no_batch_beyond_the_most_is_tried() -> None:
    assert search(100, 90, most=40) == (40, 1)
    assert search(0, 5)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["internvl2.5-8b", "internvl2.5-26b"])
def test_towers_of_the_papers_models_can_be_quantized(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their options, with few channels."""
    text, tower, _ = SHAPES[name]
    tiny_text, tiny_tower, side = SHAPES["tiny"]
    monkeypatch.setitem(SHAPES, name, ({**text, **tiny_text}, {**tower, **tiny_tower}, side))
    done = run(*TINY, "--model", name, "--budget", f"{2 * ONE}B", "--row", "plain, rtn-w8a8")
    assert done.exit_code == 0, done.output
