import json

import numpy as np
import pytest
import torch

import duotone
from duotone.evaluate import REFERENCE, evaluate, resolve_schemes
from duotone.evaluate.forcing import Forcing, kl_divergence
from duotone.evaluate.loader import Encoder
from duotone.evaluate.run import same_token_share
from duotone.tasks import Example, Task
from tiny_text import LetterTokenizer, text_model
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_model

LOSSY = "calibquant-paper"


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def run(model, schemes, samples=6, **settings):
    settings = {"batch_size": 4, "workers": 0} | settings
    return evaluate(model, TinyProcessor(), TINY_TASK, schemes, samples, **settings)


@pytest.fixture(scope="module")
def evaluation(model):
    return run(model, ["dense", LOSSY], kl=True)


def test_an_exact_cache_agrees_with_16_bit_and_a_lossy_one_does_not(evaluation):
    exact, lossy = (evaluation.results[name]["metrics"] for name in ("dense", LOSSY))
    assert exact["same_answer"]["value"] == exact["same_tokens"]["value"] == 1.0
    assert exact["same_top_token"]["value"] == 1.0
    assert abs(exact["kl"]["value"]) < 1e-6
    assert lossy["same_tokens"]["value"] < 1.0
    assert lossy["kl"]["low"] > 1e-4
    assert evaluation.answers["dense"] == evaluation.answers[REFERENCE]


def test_asking_later_lets_the_first_token_see_the_quantized_cache(model):
    plain = run(model, {"x": duotone.scheme("minmax")}, kl=True)
    held = run(model, {"x": duotone.scheme("minmax")}, kl=True, later_question=True)
    steps = [e.scores["x"]["kl"].statistics[:, 1].sum() for e in (plain, held)]
    assert steps[1] == steps[0] + 6


def test_bytes_are_summed_over_batches(evaluation):
    memory = evaluation.results[LOSSY]["memory"]
    visual_tokens = 16 * (3 + 2 * 3)
    elements = visual_tokens * 3 * 2 * (16 + 16)
    assert memory["visual_dense_equivalent_bytes"] == 4 * elements
    assert memory["visual_bits_per_element"] == pytest.approx(8 * memory["visual_bytes"] / elements)
    assert memory["nominal_bits"] == 1.0


def test_result_files_say_where_they_come_from(model, tmp_path):
    run(model, {"one": LOSSY}, out=tmp_path, split="calibration", model_name="tiny")
    (path,) = tmp_path.glob("tiny-one-*.json")
    result = json.loads(path.read_text())
    assert result["schema"] == "duotone.evaluate/1"
    assert {"torch", "transformers", "duotone", "python"} <= set(result["versions"])
    configuration = result["configuration"]
    assert duotone.CacheSpec.from_dict(configuration["spec"]) == duotone.scheme(LOSSY)
    assert (configuration["split"], configuration["model"]["name"]) == ("calibration", "tiny")
    assert configuration["max_prompt_tokens"] is None, "earlier results have it in their names"
    assert result["complete"]
    assert result["samples"] == 6
    rows = [json.loads(line) for line in path.with_suffix(".jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == [f"calibration-{i}" for i in range(6)]
    assert set(rows[0]) == {"name", "question", "answers", "answer", "answer_16_bit"}


def test_finished_schemes_are_read_and_new_ones_run(model, tmp_path, monkeypatch):
    first = run(model, ["dense"], out=tmp_path)
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    second = run(model, ["dense", LOSSY], out=tmp_path)
    assert second.results["dense"] == first.results["dense"]
    assert "dense" not in second.scores
    assert LOSSY in second.scores
    assert {path: path.read_text() for path in before} == before
    monkeypatch.setattr("duotone.evaluate.loop.prepare", None)
    third = run(model, ["dense", LOSSY], out=tmp_path)
    assert third.results == second.results


def test_another_configuration_runs_again(model, tmp_path):
    run(model, ["dense"], out=tmp_path)
    run(model, ["dense"], out=tmp_path, later_question=True)
    run(tiny_model(seed=1), ["dense"], out=tmp_path)
    assert len(list(tmp_path.glob("tiny-dense-*.json"))) == 3


def test_running_out_of_time_keeps_what_is_done(model, tmp_path):
    result = run(model, ["dense"], minutes=0.0, out=tmp_path).results["dense"]
    assert (result["samples"], result["complete"]) == (4, False)
    assert len(list(tmp_path.glob("tiny-dense-*-first-4.json"))) == 1


def test_worker_processes_give_the_same_answers(model):
    assert run(model, [], workers=1).answers == run(model, [], workers=0).answers


def letters_task():
    """Prompts of text alone, of different lengths."""
    return Task(
        name="letters",
        source=lambda split, index: Example(str(index), (), "abcdefgh"[: 3 + index] * 4, ("a",)),
        metrics=("accuracy",),
        headline="accuracy",
        max_new_tokens=12,
        size=4,
    )


def run_letters():
    # Of these weights no answer begins or ends with a space, which would be cut.
    task, model = letters_task(), text_model(seed=1)
    specs = {"exact": duotone.scheme("dense"), "kivi": duotone.scheme("kivi").replace(recent=0)}
    return evaluate(model, LetterTokenizer(), task, specs, batch_size=3, samples=4, kl=True)


def test_text_models_answer_prompts_of_text_alone():
    evaluation = run_letters()
    answers = evaluation.answers
    assert answers["exact"] == answers[REFERENCE] != answers["kivi"]
    assert all(len(answer) == 12 for answer in answers["kivi"])
    exact, lossy = (evaluation.scores[name]["kl"].value for name in ("exact", "kivi"))
    assert lossy > 1e-3 > abs(exact)


def test_questions_of_a_text_model_go_through_its_chat_template():
    encoder = Encoder(LetterTokenizer(chat_template="{}"), takes_images=False)
    ids = encoder([Example("", (), "ab", ("a",))])["input_ids"]
    assert ids.tolist() == LetterTokenizer()(["uab"])["input_ids"]
    with pytest.raises(ValueError, match="a task with pictures needs a multimodal model"):
        encoder([TINY_TASK.example(0)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 21}, "between 1 and the task's 20"),
        ({"batch_size": 0}, "batch_size must be >= 1"),
        ({"split": "test"}, "split must be one of"),
    ],
)
def test_wrong_settings_raise(model, settings, message):
    with pytest.raises(ValueError, match=message):
        run(model, [], **settings)


def test_schemes_may_be_names_specs_or_labels():
    spec = duotone.scheme("minmax", bits=2)
    assert resolve_schemes([None, "lloyd", spec]) == {
        REFERENCE: None,
        "lloyd": duotone.scheme("lloyd"),
        "spec-2": spec,
    }
    assert resolve_schemes({"mine": "lloyd", "16": None}) == {
        REFERENCE: None,
        "mine": duotone.scheme("lloyd"),
    }
    with pytest.raises(ValueError, match="lloyd"):
        resolve_schemes(["loyd"])


@pytest.mark.parametrize(
    ("ids", "reference", "share"),
    [([5, 6, 1], [5, 6, 1], 1.0), ([5, 7, 6, 1], [5, 6, 1], 0.25), ([], [], 0.0)],
)
def test_same_token_share(ids, reference, share):
    assert same_token_share(ids, reference) == share


def test_kl_divergence_is_the_textbook_one():
    p, q = torch.tensor([0.8, 0.1, 0.1]), torch.tensor([0.2, 0.2, 0.6])
    expected = sum(a * np.log(a / b) for a, b in zip(p.tolist(), q.tolist(), strict=True))
    assert kl_divergence(p.log() + 3.0, q.log()).item() == pytest.approx(expected, rel=1e-5)
    assert kl_divergence(q.log(), p.log()).item() != pytest.approx(expected, rel=1e-2)


def test_kl_divergence_ignores_what_the_reference_excludes():
    p, q = torch.tensor([1.0, 2.0, -torch.inf]), torch.tensor([2.0, 1.0, -torch.inf])
    assert kl_divergence(p, q).item() == pytest.approx(kl_divergence(p[:2], q[:2]).item())


def test_forcing_allows_only_the_reference_token():
    answers = torch.tensor([[3, 1], [2, 2]])
    reference = [torch.randn(2, 5), torch.randn(2, 5)]
    forcing = Forcing(answers, reference)
    assert forcing(None, torch.randn(2, 5)).argmax(-1).tolist() == [3, 2]
    assert forcing(None, reference[1]).argmax(-1).tolist() == [1, 2]
    assert forcing.kl[0].min() > 0
    assert forcing.kl[1].abs().max() < 1e-6
