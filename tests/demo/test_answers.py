import threading

import pytest
import torch

import duotone
from duotone.demo import answers as module
from duotone.demo.answers import Answers, marked
from duotone.inference import compare as comparing
from duotone.loading import Loaded, load
from tiny_vlm import TinyProcessor, noise, tiny_model


@pytest.fixture(scope="module")
def loaded():
    return Loaded("tiny", tiny_model(), TinyProcessor())


@pytest.fixture
def prompt(tmp_path):
    path = tmp_path / "a.png"
    noise(0).save(path)
    return comparing.prompts_of([path], ["what is this ?"])[0]


def of_kind(events, kind, side=None):
    return [e for e in events if e["event"] == kind and side in (None, e.get("side"))]


def compared(loaded, prompt, spec, tokens, later):
    outcomes = comparing.compare(loaded, [prompt], {"x": spec}, tokens, later_question=later)
    return outcomes[0].answers


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "later"])
def test_both_sides_answer_as_compare_does(loaded, prompt, later):
    spec = duotone.scheme("minmax", bits=1)
    events = list(Answers(loaded, 6).ask(prompt, spec, later))
    (expected,) = comparing.compare(loaded, [prompt], {"x": spec}, 6, later_question=later)[
        0
    ].answers
    assert events[0]["event"] == "start"
    assert 0 < events[0]["visual_tokens"] < events[0]["tokens"]
    first, second = (of_kind(events, "end", side)[0] for side in (0, 1))
    assert [first["text"], second["text"]] == [expected.reference, expected.answer]
    assert events[-1]["event"] == "done"
    assert events[-1]["same"] == expected.same
    assert " ".join(word for word, _ in events[-1]["words"]) == " ".join(expected.answer.split())


def test_a_model_of_another_family_answers_from_its_ids(loaded, prompt, monkeypatch):
    monkeypatch.setattr("duotone.inference.batch.EMBEDDABLE_FAMILIES", frozenset())
    monkeypatch.setattr(module, "EMBEDDABLE_FAMILIES", frozenset())
    spec, answers = duotone.scheme("minmax", bits=1), Answers(loaded, 6)
    assert not answers.can_ask_later
    events = list(answers.ask(prompt, spec, False))
    (expected,) = compared(loaded, prompt, spec, 6, False)
    texts = [of_kind(events, "end", side)[0]["text"] for side in (0, 1)]
    assert texts == [expected.reference, expected.answer]
    assert of_kind(events, "token", 0)[0]["tokens"] == 1


def test_bytes_and_seconds_grow_from_token_to_token(loaded, prompt):
    events = list(Answers(loaded, 5).ask(prompt, duotone.scheme("minmax"), False))
    tokens = [of_kind(events, "token", side) for side in (0, 1)]
    for side in tokens:
        assert [event["tokens"] for event in side] == list(range(1, len(side) + 1))
        for name in ("seconds", "bytes"):
            values = [event[name] for event in side]
            assert values == sorted(values)
            assert values[0] > 0
    assert tokens[1][0]["bytes"] < tokens[0][0]["bytes"] < tokens[0][-1]["bytes"]
    end = of_kind(events, "end", 1)[0]
    assert end["bytes"] == end["memory"]["total_bytes"]


def test_one_sides_error_is_said_and_the_other_answers(loaded, prompt, monkeypatch):
    make_cache = module.make_cache

    def failing(model, spec, batch):
        if spec is not None:
            raise RuntimeError("no\nroom")
        return make_cache(model, spec, batch)

    monkeypatch.setattr(module, "make_cache", failing)
    events = list(Answers(loaded, 4).ask(prompt, duotone.scheme("minmax"), False))
    assert [e["message"] for e in of_kind(events, "failed")] == ["no room"]
    assert len(of_kind(events, "end", 0)) == 1
    assert (events[-1]["event"], events[-1]["same"]) == ("done", None)


def test_a_listener_that_goes_away_stops_both_answers(loaded, prompt):
    answers, threads = Answers(loaded, 10_000), threading.active_count()
    events = answers.ask(prompt, duotone.scheme("minmax"), False)
    assert [next(events)["event"] for _ in range(3)] == ["start", "token", "token"]
    events.close()
    assert threading.active_count() == threads
    assert loaded.model.generate.__func__ is type(loaded.model).generate
    # The next question finds the model free.
    answers.max_new_tokens = 1
    assert of_kind(list(answers.ask(prompt, duotone.scheme("minmax"), False)), "waiting") == []


def test_a_second_question_waits_for_the_first(loaded, prompt):
    answers, spec = Answers(loaded, 3), duotone.scheme("minmax")
    first, second = answers.ask(prompt, spec, False), answers.ask(prompt, spec, False)
    next(first)
    assert next(second) == {"event": "waiting"}
    assert list(first)[-1]["event"] == list(second)[-1]["event"] == "done"


def test_a_scheme_that_does_not_fit_is_refused_before_any_event(loaded, prompt):
    with pytest.raises(ValueError, match="belong to a model"):
        next(Answers(loaded, 3).ask(prompt, duotone.scheme("duotone-klt"), False))


def test_words_that_the_reference_lacks_are_marked():
    assert list(marked("a red circle", "a big circle")) == [
        ("a", False),
        ("big", True),
        ("circle", False),
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("later", [False, True], ids=["at-once", "later"])
def test_on_a_gpu_answers_are_those_of_compare(later):
    loaded = load(None, "cuda")
    (prompt, *_) = comparing.bundled_prompts()
    spec = duotone.scheme("duotone")
    events = list(Answers(loaded, 64).ask(prompt, spec, later))
    (expected,) = comparing.compare(loaded, [prompt], {"x": spec}, 64, later_question=later)[
        0
    ].answers
    texts = [of_kind(events, "end", side)[0]["text"] for side in (0, 1)]
    assert texts == [expected.reference, expected.answer]
    assert of_kind(events, "failed") == []
    torch.cuda.synchronize()
