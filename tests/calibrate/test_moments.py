"""Moments against direct computations: from a text model's weights, from a prompt at a time."""

import pytest
import torch
import transformers
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from duotone.calibrate import moments
from duotone.calibrate.moments import CalibrationBatch, Recorder, gather_moments, output_metric
from duotone.calibrate.places import places_of, text_places, visual_places
from duotone.hf.model.facts import model_facts
from duotone.hf.model.text_attention import set_text_implementation
from duotone.hf.recording import NAME, recording
from duotone.inference.batch import prepare
from tiny_text import text_batch, text_model
from tiny_vlm import pictured, tiny_model

from families import FAMILIES, inputs
from families import tiny_model as family_model

SUMS = ("key", "value", "query")


def scatter(rows):
    """Sum of (x - mean)(x - mean)^T of rows [tokens, heads, d]."""
    rows = rows.double() - rows.double().mean(0)
    return torch.einsum("nhd,nhe->hde", rows, rows)


def assert_same(first, second, rtol=1e-5):
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert (one.tokens, one.queries) == (other.tokens, other.queries)
        for name in SUMS:
            a, b = getattr(one, name), getattr(other, name)
            torch.testing.assert_close(a, b, atol=rtol * float(b.abs().max()), rtol=rtol)


def direct_llama(model, ids):
    """K, V and q [tokens, heads, d] of every layer, by the modules' own weights."""
    states = model.model(ids[None], output_hidden_states=True).hidden_states
    cos, sin = model.model.rotary_emb(states[0], torch.arange(len(ids))[None])
    for layer, x in zip(model.model.layers, states, strict=False):
        x, own = layer.input_layernorm(x), layer.self_attn
        q, k, v = (
            p(x).unflatten(-1, (-1, own.head_dim)).transpose(1, 2)
            for p in (own.q_proj, own.k_proj, own.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        yield tuple(t[0].transpose(0, 1) for t in (k, v, q))


@torch.no_grad()
def test_a_text_model_by_its_weights():
    model, batch = text_model(), text_batch([11])
    found = gather_moments(model, [CalibrationBatch(batch, 1)], group=4)
    for layer, (k, v, q) in zip(found, direct_llama(model, batch["input_ids"][0]), strict=True):
        for name, x in (("key", k), ("value", v)):
            expected = sum(scatter(part) for part in x.split(4))
            torch.testing.assert_close(getattr(layer, name), expected, atol=1e-3, rtol=1e-4)
        expected = torch.einsum("nhd,nhe->de", q.double(), q.double())[None]
        torch.testing.assert_close(layer.query, expected, atol=1e-3, rtol=1e-4)
        assert (layer.tokens, layer.queries) == (11, 11)
        assert layer.sm_scale == pytest.approx(q.shape[-1] ** -0.5)


@torch.no_grad()
def test_queries_of_the_answer_are_those_of_reading_it():
    model, batch = text_model(), text_batch([9])
    answered = gather_moments(model, [CalibrationBatch(batch, 5)], group=4)
    ids = model.generate(**batch, max_new_tokens=5, do_sample=False)
    for layer, (_, _, q) in zip(answered, direct_llama(model, ids[0, :-1]), strict=True):
        expected = torch.einsum("nhd,nhe->de", q.double(), q.double())[None]
        torch.testing.assert_close(layer.query, expected, atol=1e-3, rtol=1e-4)
        assert (layer.tokens, layer.queries) == (9, 13)


@torch.no_grad()
def test_what_is_fed_behind_the_end_of_an_answer_does_not_count():
    model, both = text_model(), text_batch([9, 9])
    halves = [{name: tensor[i : i + 1] for name, tensor in both.items()} for i in range(2)]
    answer = model.generate(**halves[0], max_new_tokens=5, do_sample=False)[0, 9:]
    model.generation_config.eos_token_id = int(answer[1])
    model.generation_config.pad_token_id = 0
    apart = [CalibrationBatch(half, 5) for half in halves]
    before_end = int((answer == answer[1]).nonzero()[0])
    assert gather_moments(model, apart[:1], group=4)[0].queries == 9 + before_end
    together = gather_moments(model, [CalibrationBatch(both, 5)], group=4)
    assert_same(together, gather_moments(model, apart, group=4), rtol=1e-4)


def test_batches_are_their_sequences():
    """One and two pictures per prompt, questions of different lengths: padded, then one by one."""
    model = tiny_model()
    together = gather_moments(model, [CalibrationBatch(pictured([0, 1, 2, 3]), 4)])
    alone = gather_moments(model, [CalibrationBatch(pictured([i]), 4) for i in range(4)])
    assert_same(together, alone, rtol=1e-3)
    assert together[0].tokens == 6 * 16


@torch.no_grad()
def test_visual_tokens_of_a_multimodal_model_by_its_cache():
    model, given = tiny_model(), pictured([1])
    found = gather_moments(model, [CalibrationBatch(given, 1)])
    cache = transformers.DynamicCache(config=model.config)
    batch = prepare(model, given)
    model(**batch.model_inputs, past_key_values=cache)
    visual = batch.visual_mask[0].nonzero()[:, 0]
    for layer, stored in zip(found, cache.layers, strict=True):
        for name, x in (("key", stored.keys), ("value", stored.values)):
            rows = x[0].transpose(0, 1)[visual]
            expected = scatter(rows)  # both pictures stand side by side: one run, one span
            torch.testing.assert_close(getattr(layer, name), expected, atol=1e-3, rtol=1e-3)
        assert layer.queries == int((batch.attention_mask[0, visual[-1] + 1 :]).sum())


def test_places_of_pictures():
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8, [1] * 8, [0, 0, 0, 0, 1, 1, 1, 1]])
    visual = torch.tensor(
        [
            [0, 0, 0, 1, 1, 0, 1, 0],
            [1, 1, 0, 0, 1, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 0, 0],
            [0, 0, 0, 0, 0, 0, 1, 1],
        ]
    ).bool()
    places = visual_places(visual, real)
    assert places.spans.tolist() == [
        [-1, -1, -1, 0, 0, -1, 1, -1],
        [2, 2, -1, -1, 3, -1, -1, -1],
        [-1] * 8,
        [-1, -1, -1, -1, -1, -1, 4, 4],
    ]
    assert places.queries.int().tolist() == [
        [0, 0, 0, 0, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 1, 1, 1],
        [0] * 8,
        [0] * 8,
    ]


def test_places_of_text_start_at_the_first_real_token():
    places = text_places(torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]]), group=2)
    assert places.spans.tolist() == [[-1, 0, 0, 1], [5, 5, 6, 6]]
    assert places.queries.tolist() == [[False, True, True, True], [True] * 4]


def test_a_stream_is_of_the_tokens_between_pictures():
    batch = prepare(tiny_model(), pictured([0, 1]))
    places, text = places_of(batch, 4), batch.attention_mask.bool() & ~batch.visual_mask
    assert batch.visual_mask.any()
    assert torch.equal(places.spans >= 0, text)
    assert torch.equal(places.queries, text)
    for spans, real in zip(places.spans, text, strict=True):
        assert spans[real].unique_consecutive(return_counts=True)[1][:-1].unique().tolist() == [4]
    assert torch.equal(places_of(batch, None).spans >= 0, batch.visual_mask)


@torch.no_grad()
def test_the_metric_of_values_is_what_the_projection_makes_of_them():
    model = tiny_model()
    own, facts = model.get_decoder().layers[0].self_attn, model_facts(model)
    metric = output_metric(own, facts)
    assert metric.shape == (2, 16, 16)
    error = torch.randn(16)
    costs = []
    for q_head in range(4):
        concat = torch.zeros(4, 16)
        concat[q_head] = error
        costs.append(own.o_proj(concat.flatten()).square().sum())
    for kv_head in range(2):
        expected = (costs[2 * kv_head] + costs[2 * kv_head + 1]).double()
        found = error.double() @ metric[kv_head] @ error.double()
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


def test_a_model_without_an_output_projection_is_named():
    with pytest.raises(ValueError, match=r"Linear of 'llama' has none"):
        output_metric(torch.nn.Linear(4, 4), model_facts(text_model()))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("fails", [False, True], ids=["ends", "raises"])
def test_attention_is_the_models_own_again(implementation, fails, monkeypatch):
    model = tiny_model()
    set_text_implementation(model, implementation)
    vision = model.config.vision_config._attn_implementation
    batch = CalibrationBatch(pictured([0]), 2)
    if fails:
        monkeypatch.setattr(moments, "query_sums", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            gather_moments(model, [batch])
    else:
        assert len(gather_moments(model, [batch])) == 3
    assert model.config.get_text_config(decoder=True)._attn_implementation == implementation
    assert model.config.vision_config._attn_implementation == vision
    assert NAME not in ALL_ATTENTION_FUNCTIONS
    assert NAME not in ALL_MASK_ATTENTION_FUNCTIONS


@torch.no_grad()
def test_recording_changes_no_logits_and_leaves_the_vision_tower_alone():
    model, recorder = tiny_model(), Recorder(model_facts(tiny_model()))
    batch = pictured([0, 1])
    expected = model(**batch).logits
    recorder.begin(visual_places(batch["input_ids"] == 2, batch["attention_mask"]))
    with recording(model, recorder.record):
        torch.testing.assert_close(model(**batch).logits, expected)
        assert model.config.vision_config._attn_implementation != NAME
    assert sorted(recorder.layers) == [0, 1, 2]
    assert recorder.layers[0].queries > 0


@pytest.mark.parametrize("family", ["llava", "gemma3", "qwen2_5_vl", "qwen3"])
def test_other_families(family):
    model = family_model(family)
    parts = ["image"] if FAMILIES[family].is_multimodal else [6]
    batch = inputs(family, [[3, *parts, 4], [1, *parts, 2, *parts, 5]])
    group = None if FAMILIES[family].is_multimodal else 4
    found = gather_moments(model, [CalibrationBatch(batch, 3)], group)
    assert len(found) == model_facts(model).layers
    if FAMILIES[family].is_multimodal:
        assert found[0].tokens == 3 * FAMILIES[family].image_tokens
        assert found[0].queries >= 9
    assert all(torch.isfinite(getattr(layer, name)).all() for layer in found for name in SUMS)


def test_prompts_without_pictures_give_nothing():
    batch = pictured([0])
    batch.pop("pixel_values")
    batch["input_ids"] = batch["input_ids"].clamp(min=3)
    (first, *_) = gather_moments(tiny_model(), [CalibrationBatch(batch, 3)])
    assert (first.tokens, first.queries) == (0, 0)
