import copy
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from benchmarks import stress

from families import FAMILIES, MORE, exact_model, inputs, new_model, typed

# Experts have no linears to scale.
PLAIN = [name for name in FAMILIES if name not in {family.name for family in MORE}]
SMALL = [[6, "image", 5], [14]]
GROWN = [stress.grow_keys, stress.grow_values, stress.grow_normed]


def given(model: PreTrainedModel, name: str) -> dict[str, torch.Tensor]:
    prompts = SMALL if FAMILIES[name].is_multimodal else [[12], [7]]
    return typed(model, inputs(name, prompts))


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("grow", GROWN)
def test_outliers_change_no_logit(name: str, grow: Callable) -> None:
    model = exact_model(name)
    grown, batch = copy.deepcopy(model), given(model, name)
    grow(grown, 64)
    with torch.no_grad():
        theirs, ours = model(**batch).logits, grown(**batch).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert any(
        not torch.equal(a, b) for a, b in zip(model.parameters(), grown.parameters(), strict=True)
    )


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "internvl"])
def test_hidden_outliers_change_no_logit_and_stand_out(name: str) -> None:
    model = exact_model(name)
    grown, batch, seen = copy.deepcopy(model), given(model, name), []
    stress.grow_hidden(grown, 64)
    down = grown.get_decoder().layers[0].mlp.down_proj
    down.register_forward_pre_hook(lambda _, args: seen.append(args[0].abs().amax((0, 1))))
    with torch.no_grad():
        theirs, ours = model(**batch).logits, grown(**batch).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    assert seen[0].max() > 10 * seen[0].median()


def test_half_a_rotary_pair_would_change_logits() -> None:
    model = exact_model("llava")
    broken = copy.deepcopy(model)
    for attention in stress.attentions(broken):
        stress._scale_queries_and_keys(attention, torch.tensor([0]), 64)
    assert stress.difference(model, broken, [given(model, "llava")]) > 1e-6


def reach(model: PreTrainedModel, batch: dict[str, torch.Tensor], part: str) -> float:
    """How far the largest channel of K or V reaches, in reaches of the median one."""
    with torch.no_grad():
        layer = model(**batch, use_cache=True).past_key_values.layers[0]
    each = getattr(layer, part).abs().amax((0, 2)).flatten()
    return float(each.max() / each.median())


@pytest.mark.parametrize("name", ["llava", "qwen3_vl"])
def test_caches_hold_the_outliers(name: str) -> None:
    model = exact_model(name)
    batch = given(model, name)
    for grow, part in ((stress.grow_keys, "keys"), (stress.grow_values, "values")):
        grown = copy.deepcopy(model)
        grow(grown, 64)
        assert reach(grown, batch, part) > 15 * reach(model, batch, part)


def test_biases_and_sinks_say_what_they_change() -> None:
    model = exact_model("qwen2_vl")
    batches, found = [given(model, "qwen2_vl")], []
    for blindness in (1, 64):
        planted = copy.deepcopy(model)
        stress.plant_key_biases(planted, 300, blindness=blindness)
        assert reach(planted, batches[0], "keys") > 15
        found.append(stress.difference(model, planted, batches))
    assert found[0] > 4 * found[1] > 0
    assert stress.difference(model, model, batches) == 0
    massive = copy.deepcopy(model)
    stress.plant_sink(massive, int(batches[0]["input_ids"][0, 0]), 100)
    assert stress.difference(model, massive, batches) > 1e-6


def test_other_factors_and_normed_keys_are_refused() -> None:
    for grow in GROWN:
        with pytest.raises(ValueError, match="power of two, got 3"):
            grow(new_model("llava"), 3)
    with pytest.raises(ValueError, match="power of two, got 3"):
        stress.grow_hidden(new_model("llava"), 3)
    with pytest.raises(ValueError, match="up_proj and down_proj"):
        stress.grow_hidden(new_model("glm4v"), 2)
    with pytest.raises(ValueError, match="no norm, got Qwen3VLTextAttention"):
        stress.plant_key_biases(new_model("qwen3_vl"), 300)
