import pytest

from duotone.tasks.metrics.numbers import (
    NO_NUMBER,
    comparable_number,
    flexible_number,
    number_scores,
    strict_number,
)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("9 + 9 = 18. The answer is 18.", "18", "18."),
        ("The answer is 5. No: The answer is 6.", "5", "6."),
        ("So she has $1,234 left", NO_NUMBER, "$1,234"),
        ("The answer is -3.\nDone", "-3.", "-3."),
        ("The answer is $7.", NO_NUMBER, "$7."),
        ("he has 7", NO_NUMBER, "7"),
        ("none", NO_NUMBER, NO_NUMBER),
    ],
)
def test_numbers_are_found_as_the_harness_finds_them(text, strict, flexible):
    assert comparable_number(strict_number(text)) == comparable_number(strict)
    assert flexible_number(text) == flexible


def test_an_answer_cut_off_behind_its_last_digit_loses_it():
    assert strict_number("The answer is 29") == "2"


@pytest.mark.parametrize(
    ("text", "number"), [("$1,234.", "1234"), ("so #### 18", "18"), ("1.5", "1.5"), ("7", "7")]
)
def test_marks_around_a_number_do_not_count(text, number):
    assert comparable_number(text) == number


def test_scores_are_shares_of_right_numbers():
    texts = ["The answer is 1,000.", "it is 5", "The answer is 7. Or 8?"]
    scores = number_scores(texts, [("1000",), ("5",), ("7",)])
    assert scores["exact_match_strict"].value == pytest.approx(2 / 3)
    assert scores["exact_match_flexible"].value == pytest.approx(2 / 3)
    assert number_scores(["6"], [("5",)])["exact_match_flexible"].value == 0.0
