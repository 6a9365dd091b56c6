"""Made-up samples: noise as pictures have it, pictures of other generators, words of scripts."""

import unicodedata
from collections import Counter
from itertools import product
from random import Random

import numpy as np
import pytest

from duotone.tasks import MADE_UP, get_task
from duotone.tasks.synthetic import documents, made_up, scenes, sequences
from duotone.tasks.synthetic.made_up import SIDE, generate, leaves, noise, words


def channels(seed):
    return np.asarray(noise(seed), dtype=float)


def correlation(first, second):
    return np.corrcoef(first.ravel(), second.ravel())[0, 1]


@pytest.mark.parametrize("seed", [6, 7, 8])
def test_a_seed_always_gives_the_same_sample(seed):
    first, again = generate(seed), generate(seed)
    assert first.turns == again.turns
    assert first.images[0].tobytes() == again.images[0].tobytes()


def test_splits_have_pictures_of_their_own():
    examples = [MADE_UP.example(i, split) for split in ("calibration", "heldout") for i in range(6)]
    assert len({example.name for example in examples}) == 12
    assert len({example.images[0].tobytes() for example in examples}) == 12


def test_a_sample_is_one_large_picture_and_a_question_without_answers():
    for index in range(8):
        example = MADE_UP.example(index)
        (picture,) = example.images
        assert (picture.size, picture.mode) == ((SIDE, SIDE), "RGB")
        assert example.question
        assert example.answers == ()


def test_every_third_seed_takes_all_generators_by_turns():
    for seed, generator in ((2, documents), (5, scenes), (8, sequences), (11, documents)):
        drawn, sample = generator.generate(seed), generate(seed)
        assert sample.images[0].tobytes() == made_up._resized(drawn.images[0]).tobytes()
        assert sample.turns[0].question in [turn.question for turn in drawn.turns]


def test_noise_is_smooth_and_has_the_contrast_of_pictures():
    for seed in range(0, 24, 2):
        grey = channels(seed).mean(-1)
        assert 0.7 < correlation(grey[:, 1:], grey[:, :-1]) < 0.9999
        assert 50 < channels(seed).std() < 70
    white = np.random.default_rng(0).random((SIDE, SIDE))
    assert abs(correlation(white[:, 1:], white[:, :-1])) < 0.02


def test_leaves_have_edges_and_flat_places_where_noise_has_none():
    steps = {kind: [] for kind in (noise, leaves)}
    for seed, (kind, found) in product(range(6), steps.items()):
        grey = np.asarray(kind(seed), dtype=float).mean(-1)
        found.append(np.abs(np.diff(grey, axis=1)))
        assert 0.7 < correlation(grey[:, 1:], grey[:, :-1]) < 0.9999
    flat = {kind: np.mean([(each == 0).mean() for each in found]) for kind, found in steps.items()}
    assert flat[leaves] > 0.2 > 0.1 > flat[noise]
    tails = {k: np.mean([(e > 8 * e.mean()).mean() for e in found]) for k, found in steps.items()}
    assert tails[leaves] > 10 * tails[noise]


def test_amplitudes_of_noise_fall_with_frequency():
    """By a power between 1/f and 1/f^2, which white noise does not have."""
    radius = np.hypot(*np.meshgrid(*[np.fft.fftfreq(SIDE, 1 / SIDE)] * 2))

    def power(grey):
        found = np.abs(np.fft.fft2(grey)) ** 2
        low, high = (found[(radius >= r) & (radius < 2 * r)].mean() for r in (4, 32))
        return np.log(low / high) / np.log(8) / 2

    falls = [power(channels(seed).mean(-1)) for seed in range(0, 24, 2)]
    assert 0.7 < min(falls) < max(falls) < 2.5
    assert max(falls) - min(falls) > 0.4
    assert abs(power(np.random.default_rng(0).random((SIDE, SIDE)))) < 0.2


def test_noise_is_between_grey_and_colourful():
    found = [channels(seed) for seed in range(0, 48, 2)]
    alike = [correlation(picture[..., 0], picture[..., 1]) for picture in found]
    assert min(alike) < 0.5
    assert max(alike) > 0.95


def test_words_are_of_one_script_each_and_mostly_latin():
    scripts = Counter()
    for seed in range(60):
        found = words(Random(seed)).split(" ")
        assert 16 <= len(found) <= 32
        assert all(2 <= len(word) <= 9 for word in found)
        for word in found:
            (script,) = {unicodedata.name(letter).split()[0].split("-")[0] for letter in word}
            scripts[script if not word.isdigit() else "DIGIT"] += 1
    assert scripts.keys() == {"LATIN", "GREEK", "CYRILLIC", "CJK", "ARABIC", "DIGIT"}
    assert 0.4 < scripts["LATIN"] / scripts.total() < 0.6


def test_nobody_scores_them():
    with pytest.raises(ValueError, match="made-up samples have no answers, duotone calibrate"):
        get_task("made-up")
    with pytest.raises(ValueError, match="must have answers, got none for 'made_up-1000000000'"):
        MADE_UP.score([MADE_UP.example(0)], ["red"])
