import time
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from duotone.tasks.synthetic import documents, pairs, scenes, sequences
from duotone.tasks.synthetic.sample import CALIBRATION_SEEDS, HELD_OUT_SEEDS, TRAIN_SEEDS, Sample

GENERATORS = {"scenes": scenes, "documents": documents, "sequences": sequences, "pairs": pairs}
PICTURES = {"scenes": 1, "documents": 1, "sequences": 4, "pairs": 2}

each_task = pytest.mark.parametrize("task", GENERATORS)


def held_out(task: str, count: int) -> list[Sample]:
    start = HELD_OUT_SEEDS.start
    return [GENERATORS[task].generate(seed) for seed in range(start, start + count)]


def pixels(sample: Sample) -> np.ndarray:
    return np.stack([np.asarray(picture) for picture in sample.images])


@each_task
def test_a_seed_always_gives_the_same_sample(task):
    first, again = (GENERATORS[task].generate(1_234_567_890) for _ in range(2))
    np.testing.assert_array_equal(pixels(first), pixels(again))
    assert first.turns == again.turns
    assert first.objects == again.objects
    assert first.marks == again.marks


@each_task
def test_different_seeds_give_different_pictures(task):
    digests = {pixels(sample).tobytes() for sample in held_out(task, 30)}
    assert len(digests) == 30


@each_task
def test_pictures_have_the_size_the_model_sees(task):
    for sample in held_out(task, 10):
        assert [picture.size for picture in sample.images] == [(256, 256)] * PICTURES[task]
        assert {picture.mode for picture in sample.images} == {"RGB"}


@each_task
def test_answers_cannot_be_told_from_the_question(task):
    answers = defaultdict(set)
    for sample in held_out(task, 300):
        for turn in sample.turns:
            answers[turn.question].add(turn.answers[0])
    asked_often = {q: found for q, found in answers.items() if len(found) > 1}
    assert len(asked_often) >= 10
    assert max(len(found) for found in asked_often.values()) >= 4


@each_task
def test_rendering_is_fast(task):
    held_out(task, 5)
    start = time.process_time()
    held_out(task, 30)
    assert (time.process_time() - start) / 30 < 0.05


def test_seed_ranges_are_disjoint():
    ranges = sorted((TRAIN_SEEDS, CALIBRATION_SEEDS, HELD_OUT_SEEDS), key=lambda r: r.start)
    assert all(a.stop <= b.start for a, b in pairwise(ranges))


def test_scenes_have_five_distinct_captions_naming_every_object():
    for sample in held_out("scenes", 50):
        (caption,) = sample.of_kind("caption")
        assert caption.question == scenes.CAPTION_QUESTION
        assert len(set(caption.answers)) >= 5
        assert 2 <= len(sample.objects) <= 5
        assert all(name in caption.answers[1] for name in sample.objects)


def test_captions_name_objects_from_left_to_right():
    sample = scenes.generate(HELD_OUT_SEEDS.start)
    marks = sorted((mark.x, mark.label) for mark in sample.marks if mark.label in scenes.SHAPES)
    words = sample.of_kind("caption")[0].answers[3].rstrip(".").replace(",", "").split()
    assert [w for w in words if w in scenes.SHAPES] == [label for _, label in marks]


def test_documents_show_their_answers():
    for sample in held_out("documents", 60):
        (transcript,) = sample.of_kind("transcript")
        text = transcript.answers[0].replace("\n", " ")
        fields = sample.of_kind("field")
        assert 2 <= len(fields) <= 8
        assert all(turn.answers[0] in text for turn in fields)


def test_letters_are_marked_inside_the_page():
    for sample in held_out("documents", 30):
        letters = "".join(mark.label for mark in sample.marks)
        text = sample.of_kind("transcript")[0].answers[0]
        assert letters == "".join(text.split())
        assert all(-4 <= value <= 260 for mark in sample.marks for value in (mark.x, mark.y))


def test_marks_sit_on_ink():
    sample = scenes.generate(HELD_OUT_SEEDS.start + 3)
    picture = pixels(sample)[0].astype(int)
    corner = picture[:4, :4].mean((0, 1))
    solid = [m for m in sample.marks if m.label in ("square", "circle", "hexagon", "heart")]
    assert solid
    for mark in solid:
        assert np.abs(picture[int(mark.y), int(mark.x)] - corner).max() > 20


def test_the_commonest_sequence_answer_is_rarely_right():
    answers = defaultdict(Counter)
    for sample in held_out("sequences", 400):
        for turn in sample.turns:
            answers[turn.kind][turn.answers[0]] += 1
    total = sum(count.total() for count in answers.values())
    commonest = sum(count.most_common(1)[0][1] for count in answers.values())
    assert commonest / total < 0.35
    assert len(answers) >= 10


def test_pairs_say_which_picture_they_mean():
    for sample in held_out("pairs", 20):
        assert sample.turns
        assert all(turn.question.startswith("In the ") for turn in sample.turns)
