import pytest
from hypothesis import given
from hypothesis import strategies as st

from duotone.tasks.metrics.anls import anls, anls_of_answer, levenshtein

WORDS = st.text(alphabet="abc ", max_size=8)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [("kitten", "sitting", 3), ("", "abc", 3), ("abc", "abc", 0), ("flaw", "lawn", 2)],
)
def test_levenshtein_known_distances(a, b, distance):
    assert levenshtein(a, b) == distance


@given(WORDS, WORDS, WORDS)
def test_levenshtein_is_a_metric(a, b, c):
    assert levenshtein(a, b) == levenshtein(b, a)
    assert (levenshtein(a, b) == 0) == (a == b)
    assert levenshtein(a, c) <= levenshtein(a, b) + levenshtein(b, c)


@pytest.mark.parametrize(
    ("prediction", "references", "score"),
    [
        ("$12.50", ["$12.50"], 1.0),
        ("  Invoice   NO 7 ", ["invoice no 7"], 1.0),
        ("abcd", ["abcx"], 0.75),
        ("abcd", ["abxx"], 0.0),
        ("abcd", ["zzzz", "abcx"], 0.75),
        ("", ["abcd"], 0.0),
        ("", [""], 1.0),
    ],
    ids=["equal", "case and space", "one of four", "at threshold", "best reference", "empty", "ee"],
)
def test_anls_of_answer(prediction, references, score):
    assert anls_of_answer(prediction, references) == pytest.approx(score)


def test_anls_is_the_mean_over_questions():
    assert anls(["abcd", "nothing"], [["abcx"], ["$3.00"]]).value == pytest.approx(0.375)


@pytest.mark.parametrize(
    ("predictions", "references", "message"),
    [
        (["a"], [], "one reference entry per prediction"),
        ([], [], "at least one"),
        (["a"], [[]], "at least one reference answer"),
    ],
)
def test_anls_refuses_what_cannot_be_scored(predictions, references, message):
    with pytest.raises(ValueError, match=message):
        anls(predictions, references)
