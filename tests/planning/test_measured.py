"""Losses and speeds that the package quotes of measured schemes."""

import pytest

from duotone.planning.measured import loss_words, measured, speed_words

TASK = {"task": "captions", "metric": "recall", "value": 0.5, "reference": 0.75, "samples": 7}
TASK |= {"model": "tiny", "window": 32, "commit": "abc", "kl": {"value": 0.25}}
WORDS = {**TASK, "task": "text", "metric": "perplexity", "window": 0}
LOAD = {"load": "8b, batch 1", "ms_per_token": 2.04, "plain_ms": 20.0, "device": "GPU"}
LOAD |= {"commit": "abc"}


@pytest.mark.parametrize("of_pictures", [True, False])
def test_losses_are_those_of_the_models_kind(of_pictures: bool) -> None:
    (line,) = loss_words([TASK, {k: x for k, x in WORDS.items() if k != "kl"}], of_pictures)
    assert line == (
        "captions: recall 0.500 instead of 0.750, KL 0.250 nats (tiny, 7 samples, 32 recent "
        "tokens in 16 bit, commit abc)"
        if of_pictures
        else "text: perplexity 0.500 instead of 0.750 (tiny, 7 samples, commit abc)"
    )


def test_speeds_stand_next_to_what_was_measured_without_us() -> None:
    plain, both = speed_words([LOAD, {**LOAD, "static_ms": 3.0}])
    assert plain == "8b, batch 1: 2.0 ms per token; plain 20.0 (GPU, random weights, commit abc)"
    assert "; plain 20.0, compiled StaticCache 3.0 (GPU" in both


def test_unknown_schemes_have_no_rows() -> None:
    assert measured("kivi@3") == {"loss": [], "speed": []}
