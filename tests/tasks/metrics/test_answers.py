import pytest

from duotone.tasks.metrics.answers import accuracy, normalise_answer


@pytest.mark.parametrize(
    ("given", "normal"),
    [
        ("  The red  Circle. ", "red circle"),
        ("'blue'", "blue"),
        ("$12.50", "$12.50"),
        ("an apple!", "apple"),
        ("another", "another"),
        ("\uff13", "3"),
        ("", ""),
    ],
)
def test_normalise_answer(given, normal):
    assert normalise_answer(given) == normal


def test_accuracy_counts_any_reference_and_nothing_else():
    score = accuracy(["The Left.", "two", "up"], [["left"], ["2"], ["down", "Up"]])
    assert score.value == pytest.approx(2 / 3)


def test_accuracy_refuses_misaligned_lists():
    with pytest.raises(ValueError, match="1 predictions and 2 references"):
        accuracy(["left"], [["left"], ["right"]])
