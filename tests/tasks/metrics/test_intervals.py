import numpy as np
import pytest

from duotone.tasks.metrics import Score, confidence_interval, paired_difference, paired_ratio


@pytest.fixture
def rng():
    return np.random.default_rng(3)


def test_interval_of_a_mean_has_the_width_theory_gives(rng):
    sample = rng.normal(size=1000)
    interval = confidence_interval(Score.mean(sample), resamples=4000)
    assert interval.value == pytest.approx(sample.mean())
    width = 2 * 1.96 * sample.std() / 1000**0.5
    assert interval.high - interval.low == pytest.approx(width, rel=0.04)
    assert (interval.high + interval.low) / 2 == pytest.approx(sample.mean(), abs=0.04 * width)


def test_interval_is_reproducible_and_depends_on_the_seed(rng):
    score = Score.mean(rng.random(50))
    assert confidence_interval(score) == confidence_interval(score)
    assert confidence_interval(score) != confidence_interval(score, seed=1)


def test_paired_difference_sees_a_shift_that_unpaired_intervals_hide(rng):
    hard = rng.random(100)
    ours, theirs = Score.mean(hard + 0.01), Score.mean(hard)
    assert confidence_interval(ours).low < confidence_interval(theirs).high
    difference = paired_difference(ours, theirs)
    assert difference.low == pytest.approx(0.01)


def test_paired_difference_of_noise_contains_zero(rng):
    noise = Score.mean(rng.random(100)), Score.mean(rng.random(100))
    difference = paired_difference(*noise)
    assert difference.low < 0 < difference.high


def test_ratio_of_sums_is_not_the_mean_of_ratios():
    score = Score(np.array([[1.0, 1.0], [0.0, 3.0]]))
    assert score.value == pytest.approx(0.25)


def test_ratio_without_denominator_is_zero():
    assert Score(np.array([[0.0, 0.0]])).value == 0.0


def test_misuse_raises(rng):
    with pytest.raises(ValueError, match="same samples"):
        paired_difference(Score.mean(rng.random(3)), Score.mean(rng.random(4)))
    with pytest.raises(ValueError, match="at least one sample"):
        Score.mean([])


def test_paired_ratio_is_the_geometric_mean_over_tasks(rng):
    easy, hard = rng.random(60), rng.random(40)
    ours = [Score.mean(easy / 2), Score.mean(8 * hard)]
    theirs = [Score.mean(easy), Score.mean(hard)]
    ratio = paired_ratio(ours, theirs)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    noise = paired_ratio([Score.mean(rng.random(60))], [Score.mean(easy)])
    assert noise.low < 1 < noise.high
    assert paired_ratio(ours[:1], theirs[:1], floor=1e6).value == pytest.approx(1.0)
    with pytest.raises(ValueError, match="the same samples on both sides, got 60 and 40"):
        paired_ratio(ours[:1], theirs[1:])
