"""Plans of models whose layers keep states or pictures: the bytes of a real cache, part by part."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shrunk import new_model_of, tiny_config
from torch import Tensor
from transformers import PreTrainedModel

import duotone
from duotone import CacheSpec, KVSpec, QuantizedCache, TensorSpec
from duotone.hf.model.facts import model_facts
from duotone.hf.model.own_bytes import state_bytes
from duotone.hf.weights.checkpoint import model_class
from duotone.planning import Plan

from families import HYBRIDS, inputs, new_model, tiny_model, typed

STREAM = KVSpec(TensorSpec(2, along="tokens", group=8), TensorSpec(2, along="channels", group=8))
STREAMS = CacheSpec(visual="text", text=STREAM, sink=1, recent=5)
SPANS = CacheSpec(visual=KVSpec(TensorSpec(2), TensorSpec(2)), text=STREAM, sink=1, recent=5)
STATEFUL = [
    "qwen3_5",
    "qwen3_5_moe",
    "minicpmv4_7",
    "lfm2_vl",
    "qwen3_next",
    "olmo_hybrid",
    "nemotron_h",
    "lfm2",
    "lfm2_moe",
    "granitemoehybrid",
    "bamba",
    "jamba",
]
DELTA = {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_conv_kernel_dim": 3}
DELTA |= {"linear_key_head_dim": 7, "linear_value_head_dim": 5}
ODD = {
    "qwen3_5": DELTA,
    "qwen3_next": DELTA,
    "nemotron_h": {"mamba_num_heads": 6, "mamba_head_dim": 7, "n_groups": 3, "ssm_state_size": 5,
                   "conv_kernel": 3},
    "bamba": {"mamba_expand": 1, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 5,
              "mamba_n_groups": 2, "mamba_d_conv": 3},
    "jamba": {"mamba_expand": 3, "mamba_d_state": 5, "mamba_d_conv": 3},
    "lfm2": {"conv_L_cache": 5},
}  # fmt: skip


def check(planned: Plan, cache: QuantizedCache, spare_of: int) -> None:
    """A plan's parts are those of a cache of one sequence; buffers have slots to spare."""
    report = cache.memory()
    own = planned.windows_bytes + planned.states_bytes + planned.pictures_bytes
    assert own == report.state_bytes > 0
    assert planned.codes_bytes == report.codes_bytes > 0
    assert planned.params_bytes == report.params_bytes
    assert planned.dense_equivalent_bytes == report.dense_equivalent_bytes
    spare = sum(
        (store.key.shape[2] - int(cache.ledger.state.dense.lengths)) * shape.elements
        for store, shape in zip(cache.timeline.stores, cache.facts.shapes, strict=True)
    )
    assert planned.dense_bytes == report.dense_bytes - spare * spare_of
    parts = planned.codes_bytes + planned.params_bytes + planned.dense_bytes + own
    assert planned.bytes_per_sequence == parts
    assert planned.uncounted is None


def planned_and_cache(
    model: PreTrainedModel, given: dict[str, Tensor], spec: CacheSpec, **more: int
) -> tuple[Plan, QuantizedCache]:
    """A plan, and a cache after 13 steps."""
    cache = QuantizedCache(model, spec)
    model.generate(**given, past_key_values=cache, max_new_tokens=14)
    ids = model_facts(model).visual_token_ids
    visual = sum(int((given["input_ids"] == one).sum()) for one in ids)
    text = given["input_ids"].shape[1] - visual
    counts = {"visual_tokens": visual, "text_tokens": text, "new_tokens": 13, **more}
    return duotone.plan(model, spec, **counts), cache


@pytest.mark.parametrize("name", STATEFUL)
def test_a_plan_holds_the_states_of_a_real_cache(name: str) -> None:
    family, model = HYBRIDS[name], tiny_model(name)
    pictured = family.is_multimodal
    given = inputs(name, [[5, "image", 30] if pictured else [37]])
    planned, cache = planned_and_cache(model, given, SPANS if pictured else STREAMS)
    check(planned, cache, model.dtype.itemsize)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ODD)
def test_states_of_odd_sizes_and_types(name: str, dtype: torch.dtype) -> None:
    config = HYBRIDS[name].config()
    text = config.get_text_config(decoder=True)
    for field, value in ODD[name].items():
        assert hasattr(text, field)
        setattr(text, field, value)
    for part in {id(x): x for x in (config, text)}.values():
        part.dtype = dtype
    torch.manual_seed(0)
    model = model_class(config).from_config(config).eval().to(dtype)
    model.generation_config.eos_token_id = None
    given = typed(model, inputs(name, [[41]]))
    planned, cache = planned_and_cache(model, given, STREAMS)
    check(planned, cache, dtype.itemsize)
    assert duotone.plan(config, STREAMS, text_tokens=41, new_tokens=13) == planned
    states = cache.timeline.own.tensors.values()
    assert {x.dtype for x in states if x.dim() > 3} <= {torch.float32}


def test_a_batch_holds_as_many_states_as_sequences() -> None:
    model = tiny_model("qwen3_next")
    cache, given = QuantizedCache(model, STREAMS), inputs("qwen3_next", [[17], [5], [30]])
    model.generate(**given, past_key_values=cache, max_new_tokens=2)
    budget = 3 * (one := duotone.plan(model, STREAMS, text_tokens=31)).bytes_per_sequence
    assert 3 * one.states_bytes == cache.memory().state_bytes
    assert duotone.plan(model, STREAMS, text_tokens=31, budget_bytes=budget).max_batch == 3
    assert duotone.plan(model, STREAMS, text_tokens=31, budget_bytes=budget - 1).max_batch == 2


def test_windows_are_a_part_of_their_own() -> None:
    model = new_model("gemma3")
    given = inputs("gemma3", [[3, "image", 40]])
    planned, cache = planned_and_cache(model, given, SPANS)
    check(planned, cache, model.dtype.itemsize)
    assert planned.windows_bytes == cache.memory().state_bytes
    assert planned.states_bytes == planned.pictures_bytes == 0


@pytest.mark.filterwarnings("ignore:`hidden_state` is deprecated")
@pytest.mark.parametrize(("images", "tiles"), [(0, 1), (1, 3), (3, 2)])
def test_pictures_of_cross_layers_are_those_of_a_cache(images: int, tiles: int) -> None:
    config = tiny_config("mllama")
    vision = config.vision_config
    vision.max_num_tiles = tiles
    vision.supported_aspect_ratios = [[1, n + 1] for n in range(tiles)]
    model = new_model_of(config)
    side, tokens = vision.image_size, 41
    given: dict[str, Any] = {"input_ids": torch.randint(2, 280, (1, tokens))}
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    if images:
        given |= {
            "pixel_values": torch.randn(1, images, tiles, 3, side, side),
            "aspect_ratio_ids": torch.ones(1, images, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(1, images, tiles, dtype=torch.long),
            "cross_attention_mask": torch.ones(1, tokens, images, tiles, dtype=torch.long),
        }
    cache = QuantizedCache(model, STREAMS)
    model.generate(**given, past_key_values=cache, max_new_tokens=14)
    counts = {"text_tokens": tokens, "new_tokens": 13, "images": images}
    planned = duotone.plan(model, STREAMS, **counts)
    assert planned.pictures_bytes == cache.memory().state_bytes
    assert bool(planned.pictures_bytes) == bool(images)
    assert planned.windows_bytes == planned.states_bytes == 0
    assert planned.codes_bytes == cache.memory().codes_bytes > 0
    assert planned.dense_equivalent_bytes == cache.memory().dense_equivalent_bytes


def test_fields_of_another_name_are_no_error() -> None:
    assert state_bytes(HYBRIDS["lfm2"].config(), 2, 2) == 2 * 64 * 3 * 2
    assert state_bytes(SimpleNamespace(model_type="lfm2", hidden_size=64), 2, 2) is None


def test_what_a_config_does_not_tell_is_said() -> None:
    spec, text = duotone.scheme("kivi"), tiny_config("mllama").get_text_config(decoder=True)
    planned = duotone.plan(text, spec, text_tokens=100)
    assert planned.pictures_bytes is None
    assert planned.states_bytes == 0
    assert "K and V of pictures in 2 layers, of a size that configs of" in planned.uncounted
    planned = duotone.plan(tiny_config("qwen4_exp"), spec, text_tokens=100)
    assert planned.states_bytes is None
    assert "states of" in planned.uncounted
    assert "keys of indexers" in planned.uncounted
    packed = planned.codes_bytes + planned.params_bytes + planned.dense_bytes
    assert planned.bytes_per_sequence == packed
