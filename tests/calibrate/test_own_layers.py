"""Calibrations of models whose layers keep states or pictures: moments, and the comparison.

Every spec reads its prompts itself, into states of its own. So the comparison is that of a fresh
model, bit for bit, whatever was measured before.
"""

from typing import Any

import numpy as np
import pytest
import torch
from shrunk import tiny_config, tiny_model_of
from shrunk_pictures import with_picture
from transformers import DynamicCache, PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, TensorSpec
from duotone.calibrate import Settings, calibrate, calibration_data, compare
from duotone.calibrate.moments import CalibrationBatch, centred_sums, gather_moments
from duotone.calibrate.one_call import _asked, _given
from duotone.calibrate.places import places_of
from duotone.calibrate.run import check_settings
from duotone.calibrate.written import Written
from duotone.evaluate.forcing import Forcing, LogitsRecorder, forced_agreement
from duotone.hf.model.facts import model_facts
from duotone.hf.recommended import calibrates
from duotone.inference.batch import generate, make_cache, prepare, visual_of
from duotone.inference.prompts import right_padded
from duotone.loading import Loaded
from duotone.tune import objective
from duotone.tune.batches import ready
from duotone.tune.objective import measure
from duotone.tune.trials import Meter

from families import HYBRIDS, inputs, new_model

pytestmark = pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated")
ANSWER = 7
STREAM = KVSpec(TensorSpec(2, group=4), TensorSpec(2, along="channels", group=8))
STREAMS = CacheSpec(visual="text", text=STREAM, sink=1, recent=3)
SPANS = CacheSpec(visual=KVSpec(TensorSpec(1), TensorSpec(2)), text=STREAM, recent=2)
SPECS = [STREAMS, duotone.scheme("dense"), SPANS, STREAMS.replace(recent=0)]
PICTURED = ["qwen3_5", "lfm2_vl", "minicpmv4_7", "mllama"]
TEXTS = ["qwen3_next", "nemotron_h", "jamba", "lfm2", "granitemoehybrid"]


def model_of(name: str) -> PreTrainedModel:
    return tiny_model_of(name) if name == "mllama" else new_model(name)


def batch_of(model: PreTrainedModel, name: str, seed: int) -> dict[str, torch.Tensor]:
    """Two prompts of odd lengths, one of them padded, with pictures where the model takes some."""
    torch.manual_seed(seed)
    if name == "mllama":
        return with_picture(model, 30 + seed)
    if HYBRIDS[name].is_multimodal:
        return inputs(name, [[3, "image", 14 + seed], [1, "image", 5]], seed)
    return inputs(name, [[33 + seed], [12]], seed)


@pytest.mark.parametrize("name", [*PICTURED, *TEXTS])
def test_moments_are_those_of_the_packed_layers(name: str) -> None:
    model = model_of(name)
    given, facts = batch_of(model, name, 1), model_facts(model)
    group = None if facts.is_multimodal else 5
    found = gather_moments(model, [CalibrationBatch(given, 3)], group)
    assert len(found) == facts.layers < facts.layers + len(facts.own)
    own = DynamicCache(config=model.config)
    model.generate(**given, past_key_values=own, max_new_tokens=1)
    spans = places_of(prepare(model, given), group).spans
    for moments, number in zip(found, facts.packed, strict=True):
        for which, x in (("key", own.layers[number].keys), ("value", own.layers[number].values)):
            expected = centred_sums(x, spans)
            bound = 1e-5 * float(expected.abs().max())
            torch.testing.assert_close(getattr(moments, which), expected, atol=bound, rtol=1e-5)


def reference(model: PreTrainedModel, given: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    """(batch, answers, their logits) in 16 bit."""
    batch, recorder = prepare(model, given), LogitsRecorder()
    cache = make_cache(model, None, batch)
    answers = generate(model, batch, cache, ANSWER, logits_processors=[recorder]).token_ids
    return batch, answers, recorder.logits


@pytest.mark.parametrize("name", [*PICTURED, *TEXTS])
def test_what_is_measured_is_what_a_fresh_prefill_gives(name: str) -> None:
    model = model_of(name)
    batches = [ready(model, batch_of(model, name, seed), ANSWER) for seed in (1, 4)]
    meter = Meter(model, {"own": batches}, "cache")
    specs = [spec for spec in SPECS if spec is not SPANS or model_facts(model).is_multimodal]
    # The first spec again at the end: nothing of the others is left in the model.
    found = [meter.measured(spec)[0]["own"].rows for spec in (*specs, specs[0])]
    np.testing.assert_array_equal(found[0], found[-1])
    assert found[0][:, 0].sum() > 1e-3
    fresh = model_of(name)
    known = [reference(fresh, batch_of(fresh, name, seed)) for seed in (1, 4)]
    for spec, rows in zip(specs, found, strict=False):
        for place, (batch, answers, logits) in enumerate(known):
            alone = forced_agreement(fresh, batch, spec, answers, logits)
            np.testing.assert_array_equal(rows[2 * place : 2 * place + 2], alone)


@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "mllama"])
def test_logits_are_those_of_steps_by_hand(name: str) -> None:
    """No `generate`: a prompt in one call, then the answer's tokens one by one."""
    model = model_of(name)
    batch, answers, logits = reference(model, batch_of(model, name, 2))
    forcing, cache = Forcing(right_padded(answers, "cpu")[0], logits), None
    cache = make_cache(model, STREAMS, batch)
    generate(model, batch, cache, ANSWER, logits_processors=[forcing])
    given = {**batch.model_inputs, "past_key_values": make_cache(model, STREAMS, batch)}
    mask, sees = given.pop("attention_mask"), given.pop("cross_attention_mask", None)
    places = (mask.cumsum(1) - 1).clamp(min=0)
    for step in range(ANSWER):
        more = {} if sees is None else {"cross_attention_mask": sees}
        with torch.inference_mode():
            given |= {"attention_mask": mask, "position_ids": places, "logits_to_keep": 1}
            out = model(**given, **more).logits[:, -1]
        kl = objective.kl_divergence(logits[step], out)
        assert torch.equal(kl, forcing.kl[step])
        ids = forcing.answers[:, step, None]
        given = {"input_ids": ids, "past_key_values": given["past_key_values"]}
        mask = torch.nn.functional.pad(mask, (0, 1), value=1)
        places = places[:, -1:] + 1
        sees = None if sees is None else sees[:, -1:]


@pytest.mark.parametrize("name", ["qwen3_5", "jamba", "mllama"])
def test_no_two_specs_have_a_state_in_common(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, caches, seen = model_of(name), [], []

    def kept(*given: Any) -> Any:
        for cache, before in zip(caches, seen, strict=True):
            assert all(torch.equal(cache.timeline.own.held[n], x) for n, x in before.items())
        caches.append(make_cache(*given))
        return caches[-1]

    monkeypatch.setattr(objective, "make_cache", kept)
    batch = ready(model, batch_of(model, name, 1), ANSWER)
    for spec in (STREAMS, SPECS[1], STREAMS):
        measure(model, batch, spec, of="cache")
        held = caches[-1].timeline.own.held
        seen.append({n: x.clone() for n, x in held.items()})
        assert held
    places = [x.data_ptr() for cache in caches for x in cache.timeline.own.held.values()]
    assert len(set(places)) == len(places)
    kept(model, STREAMS, batch.batch)


@pytest.mark.parametrize("name", [*PICTURED, *TEXTS])
def test_from_samples_to_the_spec_that_is_kept(name: str) -> None:
    model = model_of(name)
    loaded = Loaded(name, model, None)
    batches = [CalibrationBatch(batch_of(model, name, seed), ANSWER) for seed in range(3)]
    heldout = {"own": [CalibrationBatch(batch_of(model, name, seed), ANSWER) for seed in (7, 8)]}
    facts = model_facts(model)
    settings = Settings(group=16, recent=2)
    bases, spec, report = calibrate(loaded, batches, settings)
    assert len(bases.key) == report["header"]["layers"] == facts.layers
    assert (spec.visual == "text") == (not facts.is_multimodal)
    end, kept = compare(loaded, bases, spec, heldout)
    assert end.samples == 4
    assert end.found.packed > 0
    assert not end.found.why
    assert kept.layers if end.kept == "calibrated" else kept != spec


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next", "mllama"])
def test_text_that_such_a_model_writes_itself(name: str) -> None:
    loaded = Loaded(name, model_of(name), None)
    data = calibration_data(loaded, [Written(48)], 3, 2, heldout=2, text=name == "qwen3_5")
    settings = Settings(text=True, group=16, recent=8)
    bases, spec, report = calibrate(loaded, data.batches, settings)
    assert (spec.visual, report["header"]["tokens"]) == ("text", 3 * 48)
    end, _ = compare(loaded, bases, spec, data.heldout)
    assert (end.samples, end.tasks) == (2, ("written",))
    assert end.found.packed > 0.8


def test_spans_in_two_parts_are_refused_before_the_model_runs() -> None:
    model = tiny_model_of("qwen4_exp")
    with pytest.raises(ValueError, match=r"an indexer\. Calibrate spans in one part"):
        check_settings(model, Settings())
    check_settings(model, Settings(foreground=None))
    check_settings(model, Settings(text=True))
    assert not calibrates(model_facts(model))  # nobody is sent to a refusal


def test_one_call_has_such_a_model_write_text() -> None:
    loaded = Loaded("mllama", tiny_model_of("mllama"), None)
    asked = _asked(loaded, model_facts(loaded.model), 2.0, None)
    assert isinstance(asked.task, Written)
    assert "pictures" not in _given(loaded, asked)


def test_tokens_of_models_that_attend_across_are_text() -> None:
    config = tiny_config("mllama")
    ids = torch.tensor([[5, config.image_token_index, 7]])
    encoded = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert not visual_of(config, encoded).any()
    assert visual_of(HYBRIDS["qwen3_5"].config(), encoded).sum() == 1
