"""Visual spans in two parts, on real models: exact without rounding, and what must raise."""

import copy
from dataclasses import replace

import pytest
import torch
from test_generate import assert_same_run, batch_of, run

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec

from families import (
    FAMILIES,
    IMAGE,
    LOGIT_TOLERANCE,
    TEXT_ONLY,
    inputs,
    logit_error,
    new_model,
    tiny_model,
)

FRONT, BACK = KVSpec(TensorSpec(4), TensorSpec(4)), KVSpec(TensorSpec(2), TensorSpec(1))
SPECS = {
    "sequence": CacheSpec(visual=FRONT, background=BACK, foreground=0.4),
    "runs": CacheSpec(visual=FRONT, background=BACK, foreground=0.4, ranges="run"),
    "tau": CacheSpec(visual=FRONT, background=BACK, ranges="run", tau=(0, 1)),
    "classes": CacheSpec(
        visual=KVSpec(TensorSpec(classes=((4, 0.5),)), TensorSpec(classes=((2, 0.5), (1, 0.5)))),
        background=KVSpec(TensorSpec(classes=((1, 0.25),)), TensorSpec(classes=((2, 0.25),))),
        foreground=0.3,
        ranges="run",
    ),
}
SEEING = [name for name in FAMILIES if name not in TEXT_ONLY]


@pytest.mark.usefixtures("exact_codec")
@pytest.mark.parametrize("name", SEEING)
@pytest.mark.parametrize("policy", ["sequence", "runs"])
def test_the_order_of_tokens_changes_nothing(name: str, policy: str) -> None:
    model, given = tiny_model(name), batch_of(name)
    assert_same_run(run(model, given, SPECS[policy]), run(model, given))


def filled(spec: CacheSpec) -> tuple[QuantizedCache, dict[str, torch.Tensor]]:
    model, given = tiny_model("internvl"), batch_of("internvl")
    cache = QuantizedCache(model, spec)
    with torch.no_grad():
        model(**given, past_key_values=cache)
    return cache, given


def next_logits(cache: QuantizedCache, mask: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    model = tiny_model("internvl")
    mask = torch.cat([mask, torch.ones_like(ids)], 1)
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, past_key_values=copy.deepcopy(cache))
    return out.logits


@pytest.mark.parametrize("policy", SPECS)
def test_parts_have_their_own_bits_and_the_plan_counts_them(policy: str) -> None:
    spec = SPECS[policy]
    cache, _ = filled(spec)
    store = cache.layers[0].store
    assert (store.visual.key.spec, store.background.key.spec) == (spec.visual.key, BACK.key) or (
        policy == "classes"
    )
    assert cache.memory().visual_dense_equivalent_bytes == 12 * 3 * 2 * 2 * 16 * 4
    images = 2 if spec.ranges == "run" else 1
    model, given = tiny_model("internvl"), inputs("internvl", [[3, "image", 9, "image", 4]])
    cache = QuantizedCache(model, spec)
    with torch.no_grad():
        model(**given, past_key_values=cache)
    planned = duotone.plan(model, spec, visual_tokens=8, images=images)
    memory = cache.memory()
    assert memory.codes_bytes == planned.codes_bytes
    assert memory.params_bytes == planned.params_bytes


def test_spans_that_stay_whole_are_those_without_a_background() -> None:
    whole = SPECS["runs"].replace(short_foreground=(9, 1.0))
    cache, given = filled(whole)
    plain, _ = filled(SPECS["runs"].replace(background=None))
    ids, mask = torch.tensor([[7, 8]]).expand(3, -1), given["attention_mask"]
    ours, theirs = (next_logits(each, mask, ids) for each in (cache, plain))
    assert logit_error(ours, theirs) < LOGIT_TOLERANCE
    assert cache.layers[0].store.background is None
    model, shape = tiny_model("internvl"), {"visual_tokens": 8, "images": 2}
    planned = (duotone.plan(model, spec, **shape) for spec in (whole, plain.spec))
    for found, expected in ((cache.memory(), plain.memory()), planned):
        assert replace(found, nominal_bits=expected.nominal_bits) == expected


def test_the_plan_counts_spans_of_every_step() -> None:
    """Spans of 4, 8 and 16 tokens: .3 in front, whole, and .4 in front."""
    spec = SPECS["runs"].replace(short_foreground=((5, 0.3), (9, 1.0)))
    # Pixels of seven pictures, whose tokens lie in three runs.
    model, given = tiny_model("internvl"), inputs("internvl", [["image"] * 7])
    ids = torch.tensor([[7, *[IMAGE] * 4, 7, 7, *[IMAGE] * 8, 7, *[IMAGE] * 16, 7]])
    given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    cache = QuantizedCache(model, spec)
    with torch.no_grad():
        model(**given, past_key_values=cache)
    store, memory = cache.layers[0].store, cache.memory()
    assert store.visual.key.blocks.offsets.tolist() == [[0, 2, 10, 17]]
    planned = [duotone.plan(model, spec, visual_tokens=n, images=1) for n in (4, 8, 16)]
    assert memory.codes_bytes == sum(each.codes_bytes for each in planned)
    assert memory.params_bytes == sum(each.params_bytes for each in planned)


def test_a_later_turn_sees_whole_spans() -> None:
    """Several tokens at once, and one after the other."""
    cache, given = filled(SPECS["runs"])
    ids = torch.tensor([[7, 8, 9]]).expand(3, -1)
    together = next_logits(cache, given["attention_mask"], ids)[:, -1]
    mask = given["attention_mask"]
    model = tiny_model("internvl")
    for token in ids.T:
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        with torch.no_grad():
            out = model(input_ids=token[:, None], attention_mask=mask, past_key_values=cache)
    assert logit_error(together, out.logits[:, -1]) < LOGIT_TOLERANCE


def test_a_crop_behind_spans_is_fine_one_into_them_is_not() -> None:
    cache, given = filled(SPECS["runs"])
    ids, mask = torch.full((3, 1), 7), given["attention_mask"]
    before, length = next_logits(cache, mask, ids), mask.shape[1]
    end = int((given["input_ids"] == IMAGE).any(0).nonzero()[-1]) + 1
    more = torch.cat([mask, torch.ones(3, 2, dtype=mask.dtype)], 1)
    model = tiny_model("internvl")
    with torch.no_grad():
        model(input_ids=torch.full((3, 2), 5), attention_mask=more, past_key_values=cache)
    cache.crop(-2)
    assert logit_error(next_logits(cache, mask, ids), before) < LOGIT_TOLERANCE
    with pytest.raises(ValueError, match=f"expected a crop to >= {end} tokens"):
        cache.crop(end - 1 - length)
    assert end < length
    cache.crop(end - length)
    assert cache.get_seq_length() == end


def test_packed_sliding_windows_are_refused() -> None:
    model = new_model("gemma3")
    QuantizedCache(model, SPECS["runs"]).detach()
    model.config.text_config.layer_types = ["sliding_attention"] * 3
    with pytest.raises(ValueError, match="sliding windows hide parts"):
        QuantizedCache(model, SPECS["runs"])


def test_a_mask_that_hides_a_part_is_refused() -> None:
    cache, given = filled(SPECS["runs"])
    mask = torch.cat([given["attention_mask"], torch.ones(3, 2, dtype=torch.long)], 1)
    first = int((given["input_ids"][0] == IMAGE).nonzero()[0])
    mask[0, first] = 0
    ids = torch.full((3, 2), 5)
    with torch.no_grad(), pytest.raises(ValueError, match="hides a part of them"):
        tiny_model("internvl")(input_ids=ids, attention_mask=mask, past_key_values=cache)
