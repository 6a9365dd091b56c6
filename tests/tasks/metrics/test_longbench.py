import sys

import pytest

from duotone.tasks.metrics import (
    best_of,
    class_scores,
    code_similarity,
    count_share,
    qa_f1,
    rouge_l,
)
from duotone.tasks.metrics.longbench import class_share

CLASSES = ("City", "Country", "Other location", "location")


@pytest.mark.parametrize(
    ("prediction", "reference", "f1"),
    [
        ("The Eiffel Tower!", "an eiffel tower", 1.0),
        ("the tower in Paris", "Eiffel Tower", 2 * (1 / 3 * 1 / 2) / (1 / 3 + 1 / 2)),
        ("no no no", "no", 0.5),
        ("", "yes", 0.0),
        ("the", "a", 0.0),
    ],
)
def test_qa_f1(prediction, reference, f1):
    assert qa_f1(prediction, reference) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("prediction", "share"), [("7", 1.0), ("7 or 8, so 7", 2 / 3), ("17", 0.0), ("none", 0.0)]
)
def test_count_share(prediction, share):
    assert count_share(prediction, " 7") == pytest.approx(share)


@pytest.mark.parametrize(
    ("prediction", "likeness"),
    [
        ("\n# a comment\n`mark`\nreturn x\nreturn y", 1.0),
        ("return y", 0.88),
        ("", 0.0),
        ("// only this", 0.0),
    ],
    ids=["first-line-of-code", "one-letter-off", "empty", "comment"],
)
def test_code_similarity(prediction, likeness):
    assert code_similarity(prediction, "return x") == likeness


@pytest.mark.parametrize(
    ("prediction", "reference", "share"),
    [
        ("Type: City", "City", 1.0),
        ("City or Country", "City", 0.5),
        ("Other location", "Other location", 1.0),
        ("location", "Other location", 0.0),
        ("Country", "City", 0.0),
    ],
)
def test_class_share(prediction, reference, share):
    assert class_share(prediction, reference, CLASSES) == share


def test_the_best_reference_counts():
    score = best_of(qa_f1, ["red", "blue"], [("green", "red"), ("red",)])
    assert score.statistics[:, 0].tolist() == [1.0, 0.0]
    score = class_scores(["City"], [("Country", "City")], [CLASSES])
    assert score.value == 1.0


def test_rouge_l_is_an_f_score_of_common_words_in_order():
    pytest.importorskip("rouge")
    assert rouge_l()("the cat sat", "the cat ran off") == pytest.approx(4 / 7, abs=1e-6)
    assert rouge_l()("off ran", "the cat ran off") == pytest.approx(2 / 6, abs=1e-6)
    for empty in ("", "...", " . "):
        assert rouge_l()(empty, "the cat") == rouge_l()("the cat", empty) == 0.0


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "rouge", None)
    with pytest.raises(ImportError, match=r"pip install 'duotone\[eval\]'"):
        rouge_l()
