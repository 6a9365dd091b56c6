import sys

import pytest

from duotone.tasks.metrics import truthful_scores

RIGHT = ("The seeds pass through you.", "Nothing happens.")
WRONG = ("Watermelons grow in your stomach.",)


def values(*predictions):
    n = len(predictions)
    scores = truthful_scores(predictions, [RIGHT] * n, [WRONG] * n)
    return {name: score.value for name, score in scores.items()}


def test_the_nearest_answers_decide():
    pytest.importorskip("sacrebleu")
    right, wrong = values(RIGHT[0]), values(WRONG[0])
    assert right["bleu_max"] == pytest.approx(100)
    assert (right["bleu_acc"], wrong["bleu_acc"]) == (1.0, 0.0)
    assert right["bleu_diff"] > 0 > wrong["bleu_diff"]
    both = values(RIGHT[0], WRONG[0])
    assert both["bleu_acc"] == 0.5
    assert both["bleu_max"] == pytest.approx((100 + wrong["bleu_max"]) / 2)


def test_bleu_is_the_textbook_one():
    """Precisions 4/5, 3/4, 2/3, 1/2, no brevity penalty: the reference has as many tokens."""
    pytest.importorskip("sacrebleu")
    scores = truthful_scores(["one two three four six"], [["one two three four five"]], [["no"]])
    expected = 100 * (4 / 5 * 3 / 4 * 2 / 3 * 1 / 2) ** 0.25
    assert scores["bleu_max"].value == pytest.approx(expected)


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(ImportError, match=r"pip install 'duotone\[eval\]'"):
        values("anything")
