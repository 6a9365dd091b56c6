import pytest

from duotone.tasks.metrics.objects import object_scores


def values(captions, objects):
    return {name: score.value for name, score in object_scores(captions, objects).items()}


def test_counts_are_pooled_over_samples():
    captions = ["Two red balls and a Blue  cube.", "a blue cube"]
    objects = [{"red ball", "blue cube"}, {"red ball", "green star", "blue cup"}]
    assert values(captions, objects) == pytest.approx(
        {"object_precision": 2 / 3, "object_recall": 2 / 5}
    )


def test_a_name_inside_another_name_is_not_counted():
    assert values(["a fire truck"], [{"fire truck", "truck"}]) == pytest.approx(
        {"object_precision": 1.0, "object_recall": 0.5}
    )


def test_a_name_inside_a_word_is_not_counted():
    assert values(["a carpet"], [{"car"}]) == {"object_precision": 0.0, "object_recall": 0.0}


def test_without_object_lists_it_raises():
    with pytest.raises(ValueError, match="names of the objects"):
        object_scores(["a car"], [set()])
