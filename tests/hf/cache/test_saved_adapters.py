"""Saved caches of models with adapters, and of models whose modules were given other numbers."""

import copy
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from adapted import MAKERS, adapted_layers, stand_in
from saved_caches import SPECS, filled, next_logits, rewrite, saved
from transformers import AutoModelForCausalLM, PreTrainedModel

from duotone import QuantizedCache
from duotone.hf.model.identity import config_differences, weights_digest
from duotone.hf.model.module_facts import adapter_facts, number_facts

from families import FAMILIES, new_model

Change = Callable[[PreTrainedModel], None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cache.safetensors"


def on_layers(method: str, *values: object) -> Change:
    def change(model: PreTrainedModel) -> None:
        for layer in adapted_layers(model):
            getattr(layer, method)(*values)

    return change


def add_to_epsilon(model: PreTrainedModel) -> None:
    model.get_decoder().layers[1].input_layernorm.variance_epsilon += 0.01


def turn_slower(model: PreTrainedModel) -> None:
    model.get_decoder().rotary_emb.inv_freq *= 0.8


def scale_attention(model: PreTrainedModel) -> None:
    model.get_decoder().layers[0].self_attn.scaling *= 3


ADAPTERS: dict[str, Change] = {
    "the other adapter": on_layers("set_adapter", ["two"]),
    "both": on_layers("set_adapter", ["one", "two"]),
    "disabled": on_layers("enable_adapters", False),
    "rescaled": on_layers("set_scale", "one", 2.0),
    "merged": on_layers("merge"),
}
BACK: dict[str, Change] = {
    "the first one": on_layers("set_adapter", ["one"]),
    "enabled": on_layers("enable_adapters", True),
    "scaled as before": on_layers("set_scale", "one", 1.0),
}
NUMBERS: dict[str, Change] = {
    "input_layernorm.variance_epsilon": add_to_epsilon,
    "rotary_emb.inv_freq": turn_slower,
    "self_attn.scaling": scale_attention,
}


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("change", ADAPTERS.values(), ids=ADAPTERS)
def test_adapters_in_another_state_are_refused(
    change: Change, maker: Callable[[str], PreTrainedModel], path: Path
) -> None:
    model = maker("internvl")
    cache = filled(model, SPECS["mixed"])
    cache.save(path)
    expected, other = next_logits(model, cache), copy.deepcopy(model)
    change(other)
    with pytest.raises(ValueError, match="adapters another state"):
        QuantizedCache.load(path, other)
    QuantizedCache.load(path, other, waive=("weights",))
    assert torch.equal(next_logits(model, QuantizedCache.load(path, model)), expected)


@pytest.mark.parametrize("maker", MAKERS)
def test_adapters_that_are_switched_back_take_their_caches(
    maker: Callable[[str], PreTrainedModel], path: Path
) -> None:
    model = maker("internvl")
    before = weights_digest(model)
    filled(model, SPECS["mixed"]).save(path)
    for name in ("the other adapter", "disabled", "rescaled"):
        ADAPTERS[name](model)
        assert weights_digest(model) != before
    for change in BACK.values():
        change(model)
    assert weights_digest(model) == before
    QuantizedCache.load(path, model)


@pytest.mark.parametrize("change", NUMBERS.items(), ids=NUMBERS)
def test_numbers_that_only_modules_have_are_refused_by_name(
    change: tuple[str, Change], path: Path
) -> None:
    model, expected = saved(path)
    other = copy.deepcopy(model)
    change[1](other)
    with pytest.raises(ValueError, match=rf"configuration: modules\.\S*{change[0]}: .* -> "):
        QuantizedCache.load(path, other)
    QuantizedCache.load(path, other, waive=("config",))
    assert torch.equal(next_logits(model, QuantizedCache.load(path, model)), expected)


@pytest.mark.parametrize("count", [7, pytest.param(24, marks=pytest.mark.slow)])
@pytest.mark.parametrize("maker", MAKERS)
def test_no_state_takes_the_cache_of_a_state_with_other_numbers(
    maker: Callable[[str], PreTrainedModel], count: int, tmp_path: Path
) -> None:
    merge, unmerge = ADAPTERS["merged"], on_layers("unmerge")
    changes = [*ADAPTERS.values(), *BACK.values(), *NUMBERS.values(), unmerge]
    rng, states = Random(0), []
    for i in range(count):
        model = maker("internvl")
        for change in rng.choices(changes, k=i % 5):
            merged = bool(adapted_layers(model)[0].merged_adapters)
            if change not in (merge, unmerge) or merged == (change is unmerge):
                change(model)
        file = tmp_path / f"{i}.safetensors"
        cache = filled(model, SPECS["mixed"])
        cache.save(file)
        states.append((model, file, next_logits(model, cache)))
    found = {"same": 0, "refused": 0, "different": 0}
    for model, _, expected in states:
        for _, file, _ in states:
            found[_outcome(file, model, expected)] += 1
    assert found["different"] == 0
    assert found["same"] >= len(states)
    assert found["refused"] > count**2 // 2


def _outcome(file: Path, model: PreTrainedModel, expected: torch.Tensor) -> str:
    try:
        loaded = QuantizedCache.load(file, model)
    except ValueError:
        return "refused"
    return "same" if torch.equal(next_logits(model, loaded), expected) else "different"


def test_a_file_that_does_not_know_the_adapters_state_is_refused(path: Path) -> None:
    model, plain = stand_in("internvl"), new_model("internvl")
    filled(model, SPECS["mixed"]).save(path)
    for layer in adapted_layers(model):
        del layer.merged_adapters, layer._active_adapter
    former = weights_digest(model)
    assert adapter_facts(model) == adapter_facts(plain) == []
    rewrite(path, lambda header, tensors: header.update(weights=former))
    with pytest.raises(ValueError, match="adapters another state"):
        QuantizedCache.load(path, stand_in("internvl"))


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_a_longer_prompt_leaves_the_numbers_of_moving_frequencies(kind: str) -> None:
    config = FAMILIES["llama"].config()
    config.rope_parameters = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0}
    config.rope_parameters |= {"original_max_position_embeddings": 8} if kind == "yarn" else {}
    config.max_position_embeddings = 8
    model = AutoModelForCausalLM.from_config(config).eval()
    before = number_facts(model)
    turned = model.model.rotary_emb.inv_freq.clone()
    with torch.no_grad():
        model(input_ids=torch.arange(20)[None])
    assert torch.equal(turned, model.model.rotary_emb.inv_freq) == (kind == "yarn")
    assert number_facts(model) == before


def test_frequencies_of_another_device_are_the_same_to_its_rounding() -> None:
    before = number_facts(new_model("llama"))
    name = "modules.model.rotary_emb.inv_freq"
    for factor, same in ((1 + 5e-7, True), (1 + 1e-5, False)):
        after = before | {name: [x * factor for x in before[name]]}
        assert (config_differences(before, after) == []) == same
