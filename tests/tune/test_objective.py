"""The fast objective against token by token decoding, and the steps it reads in."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import duotone
from duotone.evaluate.forcing import LogitsRecorder, forced_agreement
from duotone.evaluate.steps import flush_steps
from duotone.inference.batch import ask_later, encode, generate, make_cache, prepare
from duotone.inference.memory import cache_memory
from duotone.inference.prompts import encode_text
from duotone.quant import CacheSpec, KVSpec, TensorSpec
from duotone.tune.bits import held
from duotone.tune.objective import measure
from duotone.tune.prefilled import prefill
from tiny_text import LetterTokenizer, text_model
from tiny_vlm import TinyProcessor, tiny_example, tiny_model

NEW_TOKENS = 9
ROUNDING = TensorSpec(2, along="channels")
STREAM = KVSpec(TensorSpec(2, group=4), TensorSpec(2, along="channels", group=8))
LAGGING = STREAM.replace(value=STREAM.value.replace(lag=6))
VISUAL = KVSpec(TensorSpec(1), TensorSpec(1))
INNER = TensorSpec(2, along="channels", group=4, mapping="hybrid", hybrid_at="prefill")
BY_PHASE = KVSpec(INNER, TensorSpec(2, group=4))
SPECS = {
    "dense": duotone.scheme("dense"),
    "visual spans": duotone.scheme("minmax"),
    "spans, tau": duotone.scheme("calibquant"),
    "preset": duotone.scheme("duotone-whole"),
    "stream": CacheSpec(visual="text", text=STREAM, recent=4),
    "stream, sinks": CacheSpec(visual="text", text=STREAM, sink=3, recent=5, key_norm=True),
    "stream, no window": CacheSpec(visual="text", text=STREAM),
    "token by token": CacheSpec(visual="text", text=KVSpec(ROUNDING, ROUNDING), recent=2),
    "stream, drained window": CacheSpec(visual="text", text=STREAM, flush=16),
    "stream, V lags": CacheSpec(visual="text", text=LAGGING, flush=16),
    "spans beside a stream": CacheSpec(visual=VISUAL, text=STREAM, recent=1),
    "hybrid at prefill": CacheSpec(visual="text", text=BY_PHASE, recent=4),
}


@pytest.fixture(scope="module")
def model():
    return tiny_model().double()


def batch_of(model, later):
    conversations = [tiny_example("calibration", i).messages() for i in range(4)]
    batch = prepare(model, encode(TinyProcessor(), conversations))
    return ask_later(batch) if later else batch


@pytest.fixture(scope="module", params=["later", "one step"])
def prompts(request, model):
    batch = batch_of(model, request.param == "later")
    recorder = LogitsRecorder()
    cache = make_cache(model, None, batch)
    answers = generate(model, batch, cache, NEW_TOKENS, logits_processors=[recorder]).token_ids
    return batch, answers, recorder.logits, prefill(model, batch, NEW_TOKENS)


@pytest.mark.parametrize("name", SPECS)
def test_it_equals_forced_agreement(model, prompts, name):
    batch, answers, reference, prefilled = prompts
    slow = forced_agreement(model, batch, SPECS[name], answers, reference)
    fast = measure(model, prefilled, SPECS[name]).rows
    np.testing.assert_array_equal(fast[:, 1:], slow[:, 1:])
    np.testing.assert_allclose(fast[:, 0], slow[:, 0], rtol=1e-5, atol=1e-7)
    assert fast[:, 0].sum() > (-1.0 if name == "dense" else 1e-3)


@pytest.mark.parametrize("name", ["stream", "stream, no window"])
def test_one_step_over_flushes_would_be_wrong(model, prompts, name, monkeypatch):
    batch, answers, reference, prefilled = prompts
    slow = forced_agreement(model, batch, SPECS[name], answers, reference)
    monkeypatch.setattr(
        "duotone.tune.objective.flush_steps", lambda spec, tokens, **_: iter([slice(0, tokens)])
    )
    fast = measure(model, prefilled, SPECS[name]).rows
    assert np.abs(fast[:, 0] - slow[:, 0]).max() > 1e-4


def test_it_equals_forced_agreement_on_a_text_model():
    model = text_model().double()
    batch = prepare(model, encode_text(LetterTokenizer(), ["abcabcabcabc", "cab", "bbacaccab"]))
    spec = SPECS["stream"]
    recorder = LogitsRecorder()
    answers = generate(
        model, batch, make_cache(model, None, batch), NEW_TOKENS, logits_processors=[recorder]
    ).token_ids
    slow = forced_agreement(model, batch, spec, answers, recorder.logits)
    fast = measure(model, prefill(model, batch, NEW_TOKENS), spec, of="cache").rows
    np.testing.assert_allclose(fast, slow, rtol=1e-5, atol=1e-7)
    assert fast[:, 0].sum() > 1e-3


def steps(spec, streamed, question, answer):
    found = flush_steps(spec, question + answer, prompt=question, streamed=streamed)
    return [(s.start, s.stop) for s in found]


def test_steps_end_at_every_sequence_s_flushes():
    spec = CacheSpec(visual="text", text=STREAM, recent=4)  # groups of 4
    assert steps(spec, [8], 3, 6) == [(0, 3), (3, 7), (7, 9)]
    assert steps(spec, [8, 9], 3, 6) == [(0, 3), (3, 6), (6, 7), (7, 8), (8, 9)]
    assert steps(spec, [0], 0, 5) == [(0, 5)]
    assert steps(duotone.scheme("minmax"), [8, 9], 3, 6) == [(0, 9)]
    assert steps(SPECS["hybrid at prefill"], [8, 9], 3, 2) == [(0, 3), (3, 4), (4, 5)]
    assert steps(SPECS["hybrid at prefill"], [8], 0, 2) == [(0, 1), (1, 2)]


def test_bits_of_visual_spans_are_the_report_s(model, prompts):
    batch, _, _, prefilled = prompts
    spec = duotone.scheme("minmax")
    cache = make_cache(model, spec, batch)
    generate(model, batch, cache, NEW_TOKENS)
    memory = cache_memory(cache)
    assert held(cache, batch.visual_mask, "visual").bits == pytest.approx(
        memory["visual_bits_per_element"]
    )
    assert held(cache, batch.visual_mask, "cache").bits == pytest.approx(memory["bits_per_element"])
    measured = measure(model, prefilled, spec).held
    assert measured.bits == pytest.approx(memory["visual_bits_per_element"])
    assert measured.sequences == 4


def test_visual_tokens_in_a_stream_s_window_count_at_the_model_s_width(model):
    batch = batch_of(model, later=True)
    everything = CacheSpec(visual="text", text=STREAM, recent=500)
    prefilled = prefill(model, batch, NEW_TOKENS)
    dense = measure(model, prefilled, everything).held
    assert dense.bits >= 64  # float64 here, spare slots and index included
    half = measure(model, prefilled, everything.replace(recent=16)).held
    assert 10 < half.bits < 40
    assert half.elements == dense.elements == int(batch.visual_mask.sum()) * 2 * 3 * 2 * 16


def test_a_wrong_reference_shows(model, prompts):
    prefilled = prompts[3]
    shifted = replace(prefilled, reference=prefilled.reference.roll(1, 0))
    assert measure(model, shifted, SPECS["dense"]).kl > 0.01


def test_suppressed_tokens_are_no_part_of_the_distributions(model, prompts):
    assert torch.isinf(prompts[3].reference[:, 2]).all()
