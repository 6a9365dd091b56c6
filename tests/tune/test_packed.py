"""Counts of packed tokens: codes count once a compared token has seen them."""

import pytest

import duotone
from duotone.inference.batch import prepare
from duotone.inference.prompts import encode_text
from duotone.quant import CacheSpec, KVSpec, TensorSpec
from duotone.tune.answered import answer
from duotone.tune.objective import measure
from duotone.tune.packed import unproved
from duotone.tune.prefilled import prefill
from tiny_text import LetterTokenizer, text_model

STREAM = KVSpec(TensorSpec(2, group=4), TensorSpec(2, along="channels", group=8))
PROMPTS = ["abcabcabcabcabcabc", "bbacacbbacacbb"]  # 18 and 14 tokens


@pytest.fixture(scope="module")
def model():
    return text_model().double()


@pytest.fixture(scope="module", params=[prefill, answer], ids=["prefilled", "token by token"])
def ready(request, model):
    return request.param(model, prepare(model, encode_text(LetterTokenizer(), PROMPTS)), 6)


def spec(recent):
    return CacheSpec(visual="text", text=STREAM, recent=recent)


@pytest.mark.parametrize(
    ("recent", "stream"),
    [
        (0, 20 + 16),  # 22 and 18 tokens before the last one
        (10, 12 + 8),
        (18, 4),
        (19, 0),  # 23 tokens with the last one, of which it sees itself in 16 bit
        (20, 0),
        (100, 0),
    ],
)
def test_what_the_last_token_saw_is_packed(model, ready, recent, stream):
    measured = measure(model, ready, spec(recent), of="cache")
    assert (measured.packed.stream, measured.packed.sequences) == (stream, 2)
    assert bool(unproved(spec(recent), {"a": measured})) == (stream == 0)


def test_both_ways_measure_alike(model):
    batch = prepare(model, encode_text(LetterTokenizer(), PROMPTS))
    for recent in (0, 7):
        fast, slow = (
            measure(model, way(model, batch, 6), spec(recent), of="cache")
            for way in (prefill, answer)
        )
        assert fast.kl == pytest.approx(slow.kl, rel=1e-5, abs=1e-9)
        assert fast.held.elements == slow.held.elements
        assert fast.packed == slow.packed


def test_answers_of_one_token_prove_nothing(model):
    batch = prepare(model, encode_text(LetterTokenizer(), PROMPTS))
    for way in (prefill, answer):
        measured = measure(model, way(model, batch, 1), spec(0), of="cache")
        assert "no token of an answer of 'a'" in unproved(spec(0), {"a": measured})
        assert measured.packed.share == 0


def test_a_spec_without_codes_has_nothing_to_prove(model, ready):
    dense = duotone.scheme("dense")
    measured = measure(model, ready, dense, of="cache")
    assert measured.packed.share == 0
    assert unproved(dense, {"a": measured}) == ""
