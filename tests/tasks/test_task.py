from dataclasses import replace

import pytest
from PIL import Image

from duotone.tasks import Example, Task

EXAMPLES = [
    Example("0", (Image.new("RGB", (4, 4)),), "what?", ("a red ball",), frozenset({"red ball"})),
    Example("1", (), "and?", ("left", "to the left")),
]


def task(**changes):
    fields = {
        "name": "two",
        "source": lambda split, index: EXAMPLES[index],
        "metrics": ("anls", "accuracy"),
        "headline": "anls",
        "max_new_tokens": 4,
        "size": 2,
    }
    return Task(**(fields | changes))


def test_messages_hold_the_pictures_then_the_question():
    (message,) = EXAMPLES[0].messages()
    assert message["role"] == "user"
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    assert message["content"][0]["image"] is EXAMPLES[0].images[0]
    assert message["content"][1]["text"] == "what?"


def test_without_images_keeps_what_scoring_needs():
    assert EXAMPLES[0].without_images() == replace(EXAMPLES[0], images=())


def test_score_holds_every_metric_and_notices_wrong_answers():
    right = task().score(EXAMPLES, ["A red ball.", "to the left"])
    assert {name: score.value for name, score in right.items()} == pytest.approx(
        {"anls": (10 / 11 + 1) / 2, "accuracy": 1.0}
    )
    assert task().score(EXAMPLES, ["nothing", "up"])["accuracy"].value == 0.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: task().example(2), "has 2 examples, got index 2"),
        (lambda: task().example(0, "test"), "split must be one of"),
        (lambda: task().check_samples(3), "between 1 and the task's 2"),
        (lambda: task(metrics=("bleurt",)), "metrics must be among"),
        (lambda: task(metrics=()), "metrics must be among"),
    ],
)
def test_misuse_raises(call, message):
    with pytest.raises(ValueError, match=message):
        call()
