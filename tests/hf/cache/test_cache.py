"""Operations on the cache itself: batch, length, disk, lifetime, memory, and what must raise."""

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.hf.cache import waiting
from duotone.hf.cache.timeline import Timeline

from exactly import FP64, rounding_as
from families import IMAGE, LOGIT_TOLERANCE, exact_model, inputs, logit_error, tiny_model, typed

VISUAL = CacheSpec(visual=KVSpec(TensorSpec(2), TensorSpec(2)))
MIXED = VISUAL.replace(
    text=KVSpec(
        TensorSpec(4, group=4, mapping="hybrid"), TensorSpec(4, "channels", mapping="hybrid")
    ),
    recent=3,
    ranges="run",
)


def filled(
    model: PreTrainedModel, spec: CacheSpec, batch: int = 3
) -> tuple[QuantizedCache, dict[str, Tensor]]:
    rows = [[3, "image", 9, "image", 4], [11, "image", 2], [7]][:batch]
    given = inputs("internvl", rows)
    cache = QuantizedCache(model, spec)
    with torch.no_grad(), rounding_as(model.dtype):
        model(**typed(model, given), past_key_values=cache)
    return cache, given


def next_logits(model: PreTrainedModel, cache: QuantizedCache, mask: Tensor) -> Tensor:
    """Logits of one more token for every sequence; the cache itself is left alone."""
    batch = mask.shape[0]
    ids = torch.full((batch, 1), 7)
    mask = torch.cat([mask, torch.ones(batch, 1, dtype=mask.dtype)], 1)
    with torch.no_grad(), rounding_as(model.dtype):
        out = model(input_ids=ids, attention_mask=mask, past_key_values=copy.deepcopy(cache))
    return out.logits[:, -1]


NORMED = MIXED.replace(key_norm=True)
PARTED = VISUAL.replace(background=KVSpec(TensorSpec(1), TensorSpec(1)), ranges="run")


@pytest.mark.parametrize(
    "spec", [VISUAL, MIXED, NORMED, PARTED], ids=["visual", "mixed", "normed", "parted"]
)
def test_batch_operations_pick_sequences(spec: CacheSpec) -> None:
    model = exact_model("internvl")
    cache, given = filled(model, spec)
    expected = next_logits(model, cache, given["attention_mask"])
    index = torch.tensor([2, 0, 0, 1])
    for operation in ("reorder_cache", "batch_select_indices"):
        picked = copy.deepcopy(cache)
        getattr(picked, operation)(index)
        logits = next_logits(model, picked, given["attention_mask"][index])
        assert logit_error(logits, expected[index]) < LOGIT_TOLERANCE, operation
    repeated = copy.deepcopy(cache)
    repeated.batch_repeat_interleave(2)
    twice = given["attention_mask"].repeat_interleave(2, 0)
    logits = next_logits(model, repeated, twice)
    assert logit_error(logits, expected.repeat_interleave(2, 0)) < LOGIT_TOLERANCE
    chosen = copy.deepcopy(cache)
    chosen.batch_select_indices(torch.tensor([False, True, False]))
    logits = next_logits(model, chosen, given["attention_mask"][1:2])
    assert logit_error(logits, expected[1:2]) < LOGIT_TOLERANCE


def test_load_rejects_other_files(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match="not a saved duotone cache"):
        QuantizedCache.load(tmp_path / "x.safetensors", tiny_model("internvl"))
    (tmp_path / "x.txt").write_text("no tensors")
    with pytest.raises(ValueError, match="not a saved duotone cache"):
        QuantizedCache.load(tmp_path / "x.txt", tiny_model("internvl"))
    cache, _ = filled(tiny_model("internvl"), VISUAL)
    cache.save(tmp_path / "cache.safetensors")
    with pytest.raises(ValueError, match="was saved for"):
        QuantizedCache.load(tmp_path / "cache.safetensors", tiny_model("llava"))


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("removed", [1, 3, 6, 12])
def test_crop_forgets_the_last_tokens(removed: int) -> None:
    model = tiny_model("internvl")
    cache, given = filled(model, MIXED, batch=1)
    keep = given["input_ids"].shape[1] - removed
    # crop(-n) removes n tokens; crop(n) keeps n (transformers 5.17 calls it either way).
    cut, kept = copy.deepcopy(cache), copy.deepcopy(cache)
    cut.crop(-removed)
    kept.crop(keep)
    with torch.no_grad():
        dense = DynamicCache(config=model.config.get_text_config())
        model(**given, past_key_values=dense)
    dense.crop(-removed)
    mask = given["attention_mask"][:, :keep]
    expected = next_logits(model, dense, mask)
    for cropped in (cut, kept):
        assert cropped.get_seq_length() == keep
        assert logit_error(next_logits(model, cropped, mask), expected) < LOGIT_TOLERANCE


def test_crop_of_more_than_there_is_raises() -> None:
    cache, _ = filled(tiny_model("internvl"), VISUAL)
    with pytest.raises(ValueError, match="cannot remove"):
        cache.crop(-1000)


@pytest.mark.parametrize("spec", [VISUAL, NORMED], ids=["visual", "normed"])
def test_reset_forgets_everything(spec: CacheSpec) -> None:
    model = tiny_model("internvl")
    cache, given = filled(model, spec)
    expected = next_logits(model, cache, given["attention_mask"])
    cache.reset()
    assert cache.get_seq_length() == 0
    with pytest.raises(ValueError, match="empty"):
        cache.memory()
    with torch.no_grad():
        model(**given, past_key_values=cache)
    assert torch.equal(next_logits(model, cache, given["attention_mask"]), expected)


@pytest.mark.parametrize("together", [1, 2, 9])
@pytest.mark.parametrize("name", ["lloyd", "minmax", "xquant", "duotone-stream"])
def test_dense_states_of_a_prompt_coexist_up_to_a_bound(
    name: str, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When layers are quantized, the dense K and V of all before them are gone already."""
    model, given = tiny_model("internvl"), inputs("internvl", [[3, "image", 209]] * 2)
    alive: list[weakref.ref[Tensor]] = []
    peaks, layers = [], model.config.get_text_config().num_hidden_layers
    take, store = Timeline.take, Timeline._store

    def taken(timeline: Timeline, index: int, key: Tensor, value: Tensor) -> int:
        if not index:
            bound = together * (key.nbytes + value.nbytes)
            monkeypatch.setattr(waiting, "JOINED_BYTES", bound)
        alive.extend(weakref.ref(x.untyped_storage()) for x in (key, value))
        return take(timeline, index, key, value)

    def stored(timeline: Timeline, layers: list[int]) -> None:
        peaks.append(sum(ref() is not None for ref in alive))
        store(timeline, layers)

    monkeypatch.setattr(Timeline, "take", taken)
    monkeypatch.setattr(Timeline, "_store", stored)
    with torch.no_grad():
        model(**given, past_key_values=QuantizedCache(model, duotone.scheme(name)))
    count = 1 if name == "xquant" else min(together, layers)
    whole, rest = divmod(layers, count)
    assert peaks == [2 * count] * whole + [2 * rest] * (rest > 0)


@pytest.mark.parametrize("later", ["image", 5], ids=["pictures", "words"])
def test_layers_of_a_later_turn_are_stored_together(
    later: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, cache = tiny_model("internvl"), None
    stored: list[list[int]] = []
    store = Timeline._store
    monkeypatch.setattr(
        Timeline, "_store", lambda self, layers: stored.append(layers) or store(self, layers)
    )
    for row in ([3, "image", 209], [4, later, 8], [1]):
        given, stored[:] = inputs("internvl", [row] * 2), []
        cache = cache or QuantizedCache(model, duotone.scheme("lloyd"))
        given["attention_mask"] = torch.ones(2, cache.length + given["input_ids"].shape[1]).long()
        with torch.no_grad():
            model(**given, past_key_values=cache)
        layers = list(range(model.config.get_text_config().num_hidden_layers))
        assert stored == ([[n] for n in layers] if row == [1] else [layers])


def test_another_attention_function_gets_dequantized_states() -> None:
    model = exact_model("internvl")
    cache, given = filled(model, VISUAL)
    expected = next_logits(model, cache, given["attention_mask"])
    for name in ("sdpa", "eager"):
        model.set_attn_implementation({"text_config": name})
        logits = next_logits(model, cache, given["attention_mask"])
        assert logit_error(logits, expected) < LOGIT_TOLERANCE, name
    model.set_attn_implementation({"text_config": "duotone"})


def test_enable_nests_and_leaves_user_caches_alone() -> None:
    model, given = tiny_model("internvl"), inputs("internvl", [[3, "image", 9]])
    plain = model.generate(**given, max_new_tokens=6, do_sample=False)
    with duotone.enable(model, VISUAL) as outer, duotone.enable(model, MIXED) as inner:
        model.generate(**given, max_new_tokens=3)
        assert inner.cache is not None
        assert outer.cache is None
        own = DynamicCache(config=model.config.get_text_config())
        out = model.generate(**given, max_new_tokens=6, do_sample=False, past_key_values=own)
        assert torch.equal(out, plain)
        assert isinstance(own, DynamicCache)


def test_a_cache_frees_its_memory_and_its_model_at_once() -> None:
    model = tiny_model("internvl")
    gc.collect()
    gc.disable()
    try:
        cache, _ = filled(model, VISUAL)
        gone = weakref.ref(cache)
        del cache
        assert gone() is None
    finally:
        gc.enable()
    assert model.config.get_text_config()._attn_implementation == "sdpa"


def test_another_batch_size_raises() -> None:
    model = tiny_model("internvl")
    cache, given = filled(model, VISUAL)
    with pytest.raises(ValueError, match="holds 3 sequences"):
        next_logits(model, cache, given["attention_mask"][:2])


@pytest.mark.parametrize("spec", [VISUAL, NORMED], ids=["visual", "normed"])
def test_absorbing_a_dense_prefill_equals_having_been_there(spec: CacheSpec) -> None:
    model = exact_model("internvl")
    cache, given = filled(model, spec)
    dense = DynamicCache(config=model.config.get_text_config())
    with torch.no_grad(), rounding_as(model.dtype):
        model(**typed(model, given), past_key_values=dense)
    absorbed = QuantizedCache(model, spec)
    masks = {"visual_mask": given["input_ids"] == IMAGE, "attention_mask": given["attention_mask"]}
    absorbed.absorb(dense, **masks)
    assert absorbed.memory() == cache.memory()
    expected = next_logits(model, cache, given["attention_mask"])
    ours = next_logits(model, absorbed, given["attention_mask"])
    assert logit_error(ours, expected) < FP64
    with pytest.raises(ValueError, match="needs an empty cache"):
        absorbed.absorb(dense, **masks)


def test_absorbing_caches_that_do_not_fit_raises() -> None:
    model = tiny_model("internvl")
    with pytest.raises(ValueError, match="got 0 layers"):
        QuantizedCache(model, VISUAL).absorb(DynamicCache())
