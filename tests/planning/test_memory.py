import pytest
from transformers import InternVLConfig

import duotone
from duotone import SCHEMES, CacheSpec, KVSpec, QuantizedCache
from duotone.loading import load_config

from families import inputs, tiny_model


@pytest.mark.parametrize("ranges", ["sequence", "run"])
@pytest.mark.parametrize("name", [n for n, entry in SCHEMES.items() if entry.model is None])
def test_a_plan_predicts_what_the_cache_holds(name: str, ranges: str) -> None:
    check_plan(duotone.scheme(name).replace(ranges=ranges, recent=4, sink=2))


@pytest.mark.parametrize("name", ["kivi", "oscar-scaling"])
def test_a_plan_predicts_released_windows(name: str) -> None:
    spec = duotone.scheme(name, released=True).replace(flush=32)
    for lag in (9, 900):
        value = spec.text.value.replace(lag=lag)
        check_plan(spec.replace(text=KVSpec(spec.text.key, value)))


def check_plan(spec: CacheSpec) -> None:
    model = tiny_model("internvl")
    given = inputs("internvl", [[3, "image", 50, "image", 9]])
    cache = QuantizedCache(model, spec)
    model.generate(**given, past_key_values=cache, max_new_tokens=40)
    visual = int((given["input_ids"] == model.config.image_token_id).sum())
    planned = duotone.plan(
        model,
        spec,
        visual_tokens=visual,
        text_tokens=given["input_ids"].shape[1] - visual,
        new_tokens=39,
        images=2,
        budget_bytes=10**6,
    )
    report = cache.memory()
    assert planned.codes_bytes == report.codes_bytes
    assert planned.params_bytes == report.params_bytes
    assert planned.dense_equivalent_bytes == report.dense_equivalent_bytes
    spare = cache.layers[0].store.key.shape[2] - int(cache.ledger.state.dense.lengths)
    rows = 2 * 3 * 2  # K and V, layers, kv heads
    spare_bytes = spare * rows * 16 * model.dtype.itemsize
    assert planned.dense_bytes == report.dense_bytes - spare_bytes
    assert planned.max_batch == 10**6 // planned.bytes_per_sequence
    assert planned.dense_max_batch == 10**6 // report.dense_equivalent_bytes


def test_schemes_of_one_model_are_planned_for_that_model() -> None:
    """The table in docs/calibrate.md counts 1.15 true bits per number of a picture."""
    config = load_config("duotone-tiny")
    (name,) = (n for n, entry in SCHEMES.items() if entry.model is not None)
    planned = duotone.plan(config, duotone.scheme(name), visual_tokens=256)
    assert planned.bits_per_element == pytest.approx(1.14, abs=0.01)
    with pytest.raises(ValueError, match="made for a deeper model"):
        duotone.plan(tiny_model("internvl"), duotone.scheme(name), visual_tokens=256)


def test_known_numbers_of_a_7b_shape() -> None:
    """131,072 bytes per 16-bit token; 27 MB for 3,328 visual tokens at 1 bit."""
    text = {"model_type": "qwen2", "hidden_size": 4096, "num_hidden_layers": 32}
    text |= {"num_attention_heads": 32, "num_key_value_heads": 8, "dtype": "bfloat16"}
    config = InternVLConfig(text_config=text)
    planned = duotone.plan(config, duotone.scheme("minmax"), visual_tokens=3328)
    assert planned.dense_equivalent_bytes == 3328 * 131072
    assert planned.codes_bytes == 3328 * 131072 // 16
    assert 1.0 < planned.bits_per_element < 1.02
    assert planned.max_batch is None


@pytest.mark.parametrize(
    ("counts", "rule"),
    [
        ({}, "needs tokens"),
        ({"visual_tokens": -1}, "integer >= 0"),
        ({"visual_tokens": 5, "images": 0}, "at least one image"),
        ({"text_tokens": 5, "images": 2}, "2 images of 0 visual tokens"),
    ],
)
def test_bad_counts_raise(counts: dict[str, int], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        duotone.plan(tiny_model("internvl"), duotone.scheme("duotone-whole"), **counts)


def test_text_only_models_need_a_text_policy() -> None:
    with pytest.raises(ValueError, match="visual tokens only"):
        duotone.plan(tiny_model("llama"), duotone.scheme("duotone-whole"), text_tokens=5)
