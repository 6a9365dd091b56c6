"""Evicting caches inside models, against an attention function that hides what was dropped."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from eviction_oracle import Oracle, expected_kept
from test_cache import next_logits
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import sdpa_mask

import duotone
from duotone import CacheSpec, Eviction, KVSpec, QuantizedCache, TensorSpec
from duotone.hf.cache.timeline import Timeline

from exactly import FP64, rounding_as
from families import (
    IMAGE,
    LOGIT_TOLERANCE,
    TEXT_ONLY,
    exact_model,
    inputs,
    logit_error,
    tiny_model,
    typed,
)

VL = duotone.scheme("vl-cache", keep=0.3)
PYRAMID = duotone.scheme("pyramidinfer-cache", keep=0.4)
EIGHT = KVSpec(TensorSpec(8), TensorSpec(8))
STREAM = KVSpec(TensorSpec(8, group=4), TensorSpec(8, "channels", 8))
VISUAL_ONLY = CacheSpec(visual=EIGHT, evict=Eviction(0.5, which="visual", budget="pyramid"))
MIXED = CacheSpec(visual=EIGHT, text=STREAM, recent=3, evict=VL.evict)
ON_STREAM = CacheSpec(visual="text", text=STREAM, sink=2, recent=3, evict=PYRAMID.evict)
SPECS = {"vl-cache": VL, "pyramid": PYRAMID, "visual": VISUAL_ONLY, "mixed": MIXED}
SPECS |= {"stream": ON_STREAM}
# A text-only model has no visual tokens to treat apart.
CASES = [(name, policy) for name in ("internvl", "gemma3") for policy in SPECS]
CASES += [("llama", policy) for policy in ("vl-cache", "pyramid", "mixed", "stream")]
NEW = 8
ROWS = [[3, "image", 19, "image", 14], [11, "image", 12], [17]]


@pytest.fixture
def oracle() -> Iterator[Oracle]:
    made = Oracle()
    AttentionInterface.register("oracle", made)
    AttentionMaskInterface.register("oracle", sdpa_mask)
    yield made
    del AttentionInterface._global_mapping["oracle"]
    del AttentionMaskInterface._global_mapping["oracle"]


def given_of(name: str) -> dict[str, Tensor]:
    return inputs(name, [[41], [29], [7]] if name in TEXT_ONLY else ROWS)


def visual_of(given: dict[str, Tensor]) -> Tensor:
    return given["input_ids"] == IMAGE


def run(
    model: PreTrainedModel, given: dict[str, Tensor], spec: CacheSpec, **kwargs: Any
) -> tuple[Tensor, Tensor, QuantizedCache]:
    """(tokens, logits [batch, steps, vocabulary], cache) of a greedy answer."""
    cache = QuantizedCache(model, spec, **kwargs)
    with rounding_as(model.dtype):
        out = model.generate(
            **typed(model, given),
            past_key_values=cache,
            max_new_tokens=NEW,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return out.sequences, torch.stack(out.logits, 1), cache


def whole(model: PreTrainedModel, given: dict[str, Tensor], ids: Tensor, oracle: Oracle) -> Tensor:
    """Logits [batch, tokens, vocabulary] of one forward pass over `ids` under the oracle."""
    text = model.config.get_text_config()
    before, sub = text._attn_implementation, model.config is not text
    model.set_attn_implementation({"text_config": "oracle"} if sub else "oracle")
    extra = ids.shape[1] - given["input_ids"].shape[1]
    mask = torch.nn.functional.pad(given["attention_mask"], (0, extra), value=1)
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    types = {k: torch.nn.functional.pad(v, (0, extra)) for k, v in given.items() if "type" in k}
    try:
        with torch.no_grad():
            out = model(
                **{**given, **types, "input_ids": ids, "attention_mask": mask},
                position_ids=positions,
                use_cache=False,
            )
    finally:
        model.set_attn_implementation({"text_config": before} if sub else before)
    return out.logits


def places(cache: QuantizedCache, tokens: int) -> list[Tensor]:
    """[batch, tokens] for every packed layer: where the cache holds a token of the prompt."""
    masks = []
    for store, ledger in zip(cache.timeline.stores, cache.timeline.ledgers, strict=True):
        found = torch.zeros(len(ledger.state.dense.lengths), tokens, dtype=torch.bool)
        for segment, roll in store.placed_segments(ledger.state):
            for b, n in enumerate(segment.lengths.tolist()):
                at = roll.positions[b, :n].long()
                found[b, at[at < tokens]] = True
        masks.append(found)
    return masks


@pytest.mark.parametrize("spec", [VL, PYRAMID], ids=["vl-cache", "pyramidinfer-cache"])
@pytest.mark.parametrize("name", ["internvl", "gemma3", "llava", "llama"])
def test_caches_keep_the_tokens_of_the_papers_rules(
    name: str, spec: CacheSpec, oracle: Oracle
) -> None:
    """In float64: the last digit of a score may decide which of two tokens stays."""
    model = exact_model(name)
    given = typed(model, given_of(name))
    real = given["attention_mask"].bool()
    with rounding_as(model.dtype):
        whole(model, given, given["input_ids"], oracle)
    _, _, cache = run(model, given, spec)
    for seen in (oracle.weights, oracle.visible):
        packed = [seen[number] for number in cache.facts.packed]
        seen.clear()
        seen.update(enumerate(packed))
    expected = expected_kept(oracle, spec.evict, visual_of(given), real)
    for layer, (ours, theirs) in enumerate(
        zip(places(cache, real.shape[1]), expected, strict=True)
    ):
        assert torch.equal(ours, theirs), f"layer {layer}"
    assert any(not torch.equal(real, kept) for kept in expected)


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize(("name", "policy"), CASES)
def test_logits_equal_those_of_a_model_that_cannot_see_the_evicted(
    name: str, policy: str, oracle: Oracle
) -> None:
    model, given = tiny_model(name), given_of(name)
    prompt = given["input_ids"].shape[1]
    ids, logits, cache = run(model, given, SPECS[policy])
    oracle.kept = dict(zip(cache.facts.packed, places(cache, prompt), strict=True))
    expected = whole(model, given, ids[:, :-1], oracle)[:, prompt - 1 :]
    assert logit_error(logits, expected) < LOGIT_TOLERANCE
    oracle.kept = {}
    unmasked = whole(model, given, ids[:, :-1], oracle)[:, prompt - 1 :]
    assert logit_error(logits, unmasked) > 0.01


@pytest.mark.parametrize("scheme", ["dense", "calibquant", "kivi", "duotone"])
@pytest.mark.parametrize("budget", ["uniform", "pyramid", "sparsity"])
def test_keeping_all_changes_nothing(scheme: str, budget: str) -> None:
    model, given = tiny_model("internvl"), given_of("internvl")
    spec = duotone.scheme(scheme)
    plain = run(model, given, spec)
    ours = run(model, given, spec.replace(evict=Eviction(1.0, budget=budget)))
    assert torch.equal(ours[0], plain[0])
    assert torch.equal(ours[1], plain[1])
    assert ours[2].memory().codes_bytes == plain[2].memory().codes_bytes
    ours[2].crop(5)  # nothing was evicted, so nothing forbids it


@pytest.mark.parametrize("scheme", ["calibquant", "kivi", "duotone", "duotone-mixed", "innerq"])
@pytest.mark.parametrize("evict", [VL.evict, PYRAMID.evict], ids=["vl-cache", "pyramidinfer-cache"])
def test_what_stays_is_quantized_by_any_scheme(scheme: str, evict: Eviction) -> None:
    model, given = tiny_model("internvl"), given_of("internvl")
    alone = run(model, given, duotone.scheme(scheme))[2].memory()
    _, logits, cache = run(model, given, duotone.scheme(scheme).replace(evict=evict))
    both = cache.memory()
    assert logits.isfinite().all()
    assert both.dense_equivalent_bytes == alone.dense_equivalent_bytes
    assert both.visual_dense_equivalent_bytes == alone.visual_dense_equivalent_bytes
    stored, whole_cache = (r.codes_bytes + r.dense_bytes for r in (both, alone))
    assert stored < 0.8 * whole_cache


@pytest.mark.parametrize("policy", SPECS)
def test_a_batch_equals_its_sequences_alone(policy: str) -> None:
    model, given = exact_model("internvl"), given_of("internvl")
    _, logits, cache = run(model, given, SPECS[policy])
    masks = places(cache, given["input_ids"].shape[1])
    for row, parts in enumerate(ROWS):
        start = int(given["attention_mask"][row].argmax())
        alone = {k: given[k][row : row + 1, start:] for k in ("input_ids", "attention_mask")}
        before = sum(parts.count("image") for parts in ROWS[:row])
        if count := parts.count("image"):
            alone["pixel_values"] = given["pixel_values"][before : before + count]
        _, single, own = run(model, alone, SPECS[policy])
        assert logit_error(logits[row], single[0]) < FP64
        alone_masks = places(own, alone["input_ids"].shape[1])
        for ours, theirs in zip(masks, alone_masks, strict=True):
            assert torch.equal(ours[row, start:], theirs[0])


def filled(model: PreTrainedModel, given: dict[str, Tensor], spec: CacheSpec) -> QuantizedCache:
    cache = QuantizedCache(model, spec)
    with torch.no_grad():
        model(**given, past_key_values=cache)
    return cache


@pytest.mark.parametrize("policy", SPECS)
def test_batch_operations_and_files_follow_every_layer(policy: str, tmp_path: Path) -> None:
    model, given = tiny_model("internvl"), given_of("internvl")
    mask, cache = given["attention_mask"], filled(model, given, SPECS[policy])
    expected = next_logits(model, cache, mask)
    cache.save(tmp_path / "cache.safetensors")
    loaded = QuantizedCache.load(tmp_path / "cache.safetensors", model)
    assert torch.equal(next_logits(model, loaded, mask), expected)
    ours, theirs = loaded.memory().to_dict(), cache.memory().to_dict()
    for part in ("codes", "params", "dense", "dense_equivalent", "visual_dense_equivalent"):
        assert ours[f"{part}_bytes"] == theirs[f"{part}_bytes"]
    for one in (cache, loaded):
        with pytest.raises(ValueError, match="kept whole"):
            copy.deepcopy(one).crop(-1)
    index = torch.tensor([2, 0, 0])
    loaded.reorder_cache(index)
    assert logit_error(next_logits(model, loaded, mask[index]), expected[index]) < LOGIT_TOLERANCE
    loaded.reset()
    assert loaded.get_seq_length() == 0


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("policy", SPECS)
def test_generated_tokens_can_be_cropped(policy: str) -> None:
    model, given = tiny_model("internvl"), given_of("internvl")
    cache = filled(model, given, SPECS[policy])
    mask, expected = given["attention_mask"], next_logits(model, cache, given["attention_mask"])
    ones = torch.ones(3, 1, dtype=torch.long)
    with torch.no_grad():
        model(input_ids=9 * ones, attention_mask=torch.cat([mask, ones], 1), past_key_values=cache)
    cache.crop(-1)
    assert cache.get_seq_length() == mask.shape[1]
    assert logit_error(next_logits(model, cache, mask), expected) < LOGIT_TOLERANCE


def test_later_turns_stay_whole() -> None:
    model, given = tiny_model("internvl"), given_of("internvl")
    cache = filled(model, given, VL)
    held = [ledger.state.dense.lengths.clone() for ledger in cache.timeline.ledgers]
    mask = torch.cat([given["attention_mask"], torch.ones(3, 6, dtype=torch.long)], 1)
    with torch.no_grad():
        ids = torch.randint(2, 280, (3, 6))
        model(input_ids=ids, attention_mask=mask, past_key_values=cache)
    for ledger, before in zip(cache.timeline.ledgers, held, strict=True):
        assert torch.equal(ledger.state.dense.lengths, before + 6)


def test_states_are_held_for_budgets_by_sparsity_only(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = tiny_model("internvl"), given_of("internvl")
    waiting: list[int] = []
    commit = Timeline.commit

    def watched(self: Timeline) -> None:
        before = len(self._waiting)
        commit(self)
        if len(self._waiting) < before:
            waiting.append(before)

    monkeypatch.setattr(Timeline, "commit", watched)
    filled(model, given, VL)
    assert waiting == [3]
    waiting.clear()
    filled(model, given, PYRAMID)
    assert waiting == [1, 1, 1]


def test_what_has_no_queries_or_no_scores_raises() -> None:
    model, given = tiny_model("internvl"), given_of("internvl")
    with pytest.raises(ValueError, match="absorb needs a scheme that keeps all"):
        QuantizedCache(model, VL).absorb(DynamicCache())
    cache = QuantizedCache(model, VL)
    model.set_attn_implementation({"text_config": "sdpa"})
    with pytest.raises(NotImplementedError, match="duotone's own attention"):
        model(**given, past_key_values=cache)
    model.set_attn_implementation({"text_config": "duotone"})


def test_evicting_visual_tokens_of_a_text_model_raises() -> None:
    spec = CacheSpec(visual="dense", evict=Eviction(which="visual"))
    with pytest.raises(ValueError, match="evicts visual tokens only"):
        QuantizedCache(tiny_model("llama"), spec)
