import json
from dataclasses import replace

import pytest

import duotone
from duotone.inference import batch as inference
from duotone.inference import compare as comparing
from duotone.loading import Loaded
from tiny_vlm import TinyProcessor, noise, tiny_model


@pytest.fixture(scope="module")
def loaded():
    return Loaded("tiny", tiny_model(), TinyProcessor())


@pytest.fixture
def prompts(tmp_path):
    for seed, name in enumerate(("a.png", "b.png")):
        noise(seed).save(tmp_path / name)
    files = [tmp_path / "a.png", tmp_path / "b.png"]
    return comparing.prompts_of(files, ["what is this ?", "how many red ?"])


def test_an_exact_scheme_gives_only_equal_answers(loaded, prompts):
    schemes, seen = {"dense": duotone.scheme("dense")}, []
    outcome = comparing.compare(loaded, prompts, schemes, 6, lambda *n: seen.append(n))[0]
    assert outcome.same_answers == len(outcome.answers) == 4
    assert all(answer.reference for answer in outcome.answers)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_lossy_scheme_counts_its_differences_and_its_bytes(loaded, prompts):
    spec = duotone.scheme("minmax", bits=1)
    outcome = comparing.compare(loaded, prompts, {"minmax": spec}, 6)[0]
    assert outcome.same_answers == sum(a.reference == a.answer for a in outcome.answers) < 4
    memory = outcome.memory
    assert outcome.ratio("visual") == (
        memory["visual_dense_equivalent_bytes"] / memory["visual_bytes"]
    )
    assert outcome.ratio("visual") > 4
    assert outcome.sentence().startswith(f"The pictures' cache is {outcome.ratio('visual'):.1f}x")
    assert f"{outcome.same_answers} of 4 answers" in outcome.sentence()
    assert 0 < outcome.ms_per_token < 1000
    data = json.loads(json.dumps(outcome.to_dict()))
    assert data["answers"][0]["picture"] == "a.png"
    assert data["answers"][0]["same"] == outcome.answers[0].same
    assert data["memory"]["nominal_bits"] == 1
    assert "at 1 bit, " in outcome.sentence()
    for bits, words in ((1.004, "at 1 bit, "), (1.5, "at 1.5 bits, ")):
        of_bits = replace(outcome, memory=memory | {"nominal_bits": bits})
        assert words in of_bits.sentence()
    assert data["memory"]["visual_bits_per_element"] > 1
    expected = {"ms_per_token", "reference_ms_per_token", "same_answers", "visual_ratio"}
    assert expected | {"total_ratio", "sentence", "spec", "model", "scheme"} <= set(data)


@pytest.mark.parametrize("later", [False, True], ids=["at-once", "later"])
def test_what_schemes_and_questions_share_is_computed_once(loaded, prompts, monkeypatch, later):
    specs = {name: duotone.scheme(name) for name in ("minmax", "calibquant")}
    alone = {
        name: [
            comparing.compare(loaded, [prompt], {name: spec}, 5, later_question=later)[0].answers[0]
            for prompt in prompts
        ]
        for name, spec in specs.items()
    }
    calls = []
    features, read = loaded.model.get_image_features, inference._read_pictures
    monkeypatch.setattr(
        loaded.model, "get_image_features", lambda **g: calls.append("seen") or features(**g)
    )
    monkeypatch.setattr(
        inference, "_read_pictures", lambda *given: calls.append("read") or read(*given)
    )
    outcomes = comparing.compare(loaded, prompts, specs, 5, later_question=later)
    assert {o.scheme: o.answers for o in outcomes} == alone
    pictures = len({prompt.picture for prompt in prompts})
    assert calls.count("seen") == pictures < len(prompts)
    assert calls.count("read") == (pictures if later else 0)


def test_every_question_is_asked_about_every_picture():
    prompts = comparing.prompts_of(["x/a.png", "b.png"], ["one?", "two?"])
    assert [(p.picture, p.question) for p in prompts] == [
        ("a.png", "one?"),
        ("a.png", "two?"),
        ("b.png", "one?"),
        ("b.png", "two?"),
    ]
    assert comparing.prompts_of(["a.png"], [])[0].question == comparing.DEFAULT_QUESTION


def test_the_bundled_questions_are_enough_for_a_demo():
    prompts = comparing.bundled_prompts()
    assert len(prompts) >= 10
    assert len({prompt.picture for prompt in prompts}) >= 3
    for prompt in prompts:
        pictures = prompt.messages()[0]["content"][:-1]
        assert [part["image"].mode for part in pictures] == ["RGB"] * len(prompt.images)


def test_no_prompts_raise(loaded):
    with pytest.raises(ValueError, match="at least one prompt"):
        comparing.compare(loaded, [], {"dense": duotone.scheme("dense")})


def test_what_was_asked_and_of_which_model_is_said_first(loaded, prompts):
    outcome = comparing.compare(loaded, prompts, {"dense": duotone.scheme("dense")}, 2)[0]
    millions = loaded.model.num_parameters() / 1e6
    assert outcome.asked() == (
        f"4 questions about a.png, b.png, answered by tiny, {millions:,.1f} M parameters."
    )
