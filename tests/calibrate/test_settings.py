"""Settings of a calibration: constants by part, and how spans are divided."""

import pytest

from duotone.calibrate import Settings
from duotone.calibrate.settings import tensor_weights
from duotone.hf.model.facts import model_facts
from tiny_text import text_model
from tiny_vlm import tiny_model

PICTURED, WORDS = model_facts(tiny_model()), model_facts(text_model())


@pytest.mark.parametrize(
    ("tokens", "front"), [(24, 11), (49, 23), (127, 58), (128, 64), (256, 128), (3328, 1472)]
)
def test_long_spans_are_divided_in_whole_tiles(tokens, front):
    shares = Settings().shares(PICTURED, tokens)
    assert shares["visual"] * tokens == pytest.approx(front)
    assert sum(shares.values()) == 1
    assert Settings(foreground=None).shares(PICTURED, tokens) == {"visual": 1.0}


@pytest.mark.parametrize(
    ("settings", "facts"), [(Settings(), WORDS), (Settings(text=True), PICTURED)]
)
def test_streams_are_of_text_models_and_of_others_where_that_is_asked_for(settings, facts):
    assert settings.is_text(facts)
    assert settings.group_of(facts) == 64
    assert settings.parts(facts) == settings.shares(facts, 49) == {"text": 1.0}
    assert settings.division(facts) == {}
    assert not Settings().is_text(PICTURED)
    assert Settings().group_of(PICTURED) is None


def test_streams_have_constants_of_their_own():
    parts = ["text"]
    assert (Settings().code_bits(parts), Settings().code_bits(["visual"])) == (2, 1)
    assert Settings(bits=1.5).code_bits(parts) == 1.5
    assert Settings().quantizer("value", parts).energy == 1.5
    assert dict(tensor_weights(parts)) == {"key": 1, "value": 1}
    assert dict(tensor_weights(["visual"])) == {"key": 0.5, "value": 1}


@pytest.mark.parametrize(("bits", "gain"), [(1.0, 1.25), (2.0, 1.1), (4.0, 1.0)])
def test_levels_of_values_move_apart_where_they_are_few(bits, gain):
    settings, parts = Settings(bits=bits), ("visual", "background")
    assert settings.quantizer("value", ["visual"]).gain == gain
    assert settings.quantizer("value", parts).gain == (1.1 if bits == 1 else 1.0)
    assert settings.quantizer("key", parts).gain == "fit"


def test_keys_of_whole_spans_keep_their_ends():
    found = [
        Settings().quantizer("key", p) for p in (["visual"], ["visual", "background"], ["text"])
    ]
    assert [(key.levels, key.energy, key.gain) for key in found] == [
        ("uniform", 0.0, "fit"),
        ("lloyd", 1.0, "fit"),
        ("lloyd", 1.0, "fit"),
    ]


def test_the_metric_counts_for_whole_spans_and_streams():
    floors = [Settings().floor(p) for p in (["visual", "background"], ["visual"], ["text"])]
    assert floors == [100, 1, 10]
    assert Settings(regularization=0.1).floor(["visual", "background"]) == 0.1


def test_few_codes_of_a_stream_have_a_gain():
    gains = [Settings(bits).quantizer("value", ["text"]).gain for bits in (1, 1.5, 2, None)]
    assert gains == [1.1, 1.1, 1.0, 1.0]
