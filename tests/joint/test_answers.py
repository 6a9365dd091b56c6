"""A quantized model along the 16-bit model's answers, against decoding token by token."""

import numpy as np
import pytest

import duotone
from duotone.evaluate.forcing import LogitsRecorder, forced_agreement
from duotone.inference.batch import ask_later, encode, generate, make_cache, prepare
from duotone.joint.answers import Answers
from duotone.quantize import calibration_set, quantize_model
from duotone.tune.objective import measure
from duotone.tune.prefilled import follow, prefill
from duotone.weights import get_recipe
from tiny_vlm import TINY_TASK, TinyProcessor, tiny_example, tiny_model

from mquant_setups import tiny_loaded

NEW_TOKENS = 6


@pytest.fixture(scope="module")
def encoded():
    conversations = [tiny_example("calibration", i).messages() for i in range(4)]
    return encode(TinyProcessor(), conversations)


def quantized(recipe):
    base = tiny_loaded()
    quantize_model(base.model, recipe, calibration_set(base, [TINY_TASK], 4))
    return base.model


@pytest.fixture(scope="module")
def coarse():
    """4-bit weights and activations as they are: no code flips where floats are rounded."""
    return quantized(get_recipe("w4a16-g128").replace(group=16))


@pytest.mark.parametrize("name", ["dense", "minmax", "duotone"])
@pytest.mark.parametrize("later", [True, False])
def test_divergence_is_that_of_decoding_along_the_first_models_answers(
    encoded, coarse, name, later
):
    base, spec = tiny_model(), duotone.scheme(name)
    batch, other = (prepare(model, encoded) for model in (base, coarse))
    if later:
        batch, other = ask_later(batch), ask_later(other)
    recorder = LogitsRecorder()
    cache = make_cache(base, None, batch)
    answers = generate(base, batch, cache, NEW_TOKENS, logits_processors=[recorder]).token_ids
    wanted = forced_agreement(coarse, other, spec, answers, recorder.logits)
    first = prefill(base, batch, NEW_TOKENS)
    found = measure(coarse, follow(coarse, other, first), spec).rows
    assert wanted[:, 0].sum() > 0.05
    np.testing.assert_allclose(found[:, 0], wanted[:, 0], rtol=2e-3)
    np.testing.assert_array_equal(found[:, 2], wanted[:, 2])


def test_answers_are_kept_without_the_first_models_caches(encoded, coarse):
    answers = Answers()
    answers.add(tiny_model(), encoded, NEW_TOKENS)
    (first,) = answers._made.values()
    assert (first.dense, first.tail, first.batch.model_inputs) == (None, {}, {})
    made = answers.make_ready(coarse, encoded, NEW_TOKENS)
    assert measure(coarse, made, duotone.scheme("dense")).kl > 0.01
    other = {**encoded, "pixel_values": encoded["pixel_values"] + 1}
    with pytest.raises(KeyError):
        answers.make_ready(coarse, other, NEW_TOKENS)


def test_both_ways_of_measuring_agree(encoded, coarse, monkeypatch):
    kl = []
    for can in (True, False):
        monkeypatch.setattr("duotone.tune.batches.can_prefill", lambda *_, can=can: can)
        monkeypatch.setattr("duotone.tune.batches.later_where_possible", lambda batch: batch)
        answers = Answers()
        answers.add(tiny_model(), encoded, NEW_TOKENS)
        made = answers.make_ready(coarse, encoded, NEW_TOKENS)
        kl.append(measure(coarse, made, duotone.scheme("minmax")).kl)
    assert kl[0] == pytest.approx(kl[1], rel=2e-3)


def test_scales_per_modality_know_the_visual_tokens(encoded):
    answers = Answers()
    answers.add(tiny_model(), encoded, NEW_TOKENS)
    dense = duotone.scheme("dense")
    near, far = (
        measure(model, answers.make_ready(model, encoded, NEW_TOKENS), dense).kl
        for model in map(quantized, map(get_recipe, ("mquant-w8a8", "mquant-w4a8")))
    )
    assert 0 < near < far


def test_a_batch_that_is_read_in_other_steps_cannot_follow(encoded, coarse):
    base = tiny_model()
    first = prefill(base, prepare(base, encoded), NEW_TOKENS)
    with pytest.raises(ValueError, match="in equal steps"):
        follow(coarse, ask_later(prepare(coarse, encoded)), first)
