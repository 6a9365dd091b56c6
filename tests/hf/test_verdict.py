"""`supports` says of a model, or of its config alone, the words that a run would."""

import pytest
import torch
from transformers import CONFIG_MAPPING

import duotone
from duotone.hf.model.facts import TESTED_FAMILIES
from duotone.hf.verdict import supports

from families import FAMILIES, HYBRIDS, Family, new_model, tiny_model

SPEC = duotone.scheme("duotone-mixed")


def given(family: Family) -> tuple[str, ...]:
    """Inputs that the suite has for a family."""
    pictures = ("pictures",) if family.is_multimodal else ("text",)
    return pictures if family.video is None else (*pictures, "video")


def test_tested_types_are_the_families_that_tests_build() -> None:
    built = {**FAMILIES, **HYBRIDS}
    assert {family.name: given(family) for family in built.values()} == TESTED_FAMILIES


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "llama", "smolvlm"])
def test_a_config_alone_has_the_row_of_its_model(name: str) -> None:
    model = tiny_model(name)
    assert supports(model.config, SPEC) == supports(model, SPEC)


def test_words_of_a_tested_model() -> None:
    everything = {"cache": "works", "graphs": "works", "weights": "works", "video": "works"}
    assert supports(FAMILIES["qwen2_5_vl"].config(), SPEC).words() == everything


def test_refusals_are_those_of_enable() -> None:
    model = new_model("internvl")
    vars(model.config)["image_token_id"] = None
    with pytest.raises(ValueError, match="takes pictures") as refused, duotone.enable(model, SPEC):
        pass
    row = supports(model, SPEC)
    assert row.cache == str(refused.value)
    assert row.words()["graphs"] == "refused: the cache is refused"


def test_graphs_are_refused_by_their_own_rules() -> None:
    config = FAMILIES["mistral"].config()
    config.sliding_window = 24
    assert "sliding windows" in supports(config, duotone.scheme("kivi")).graphs
    model = new_model("llama")
    model.lm_head.register_forward_hook(lambda *_: None)
    row = supports(model, SPEC)
    assert (row.cache, "lm_head" in row.graphs) == (None, True)


def test_the_spec_counts() -> None:
    config = FAMILIES["llama"].config()
    assert "has none" in supports(config, duotone.scheme("duotone")).cache
    assert supports(config, duotone.scheme("kivi")).cache is None


def test_untested_types_say_so() -> None:
    row = supports(CONFIG_MAPPING["glm_ocr"](), SPEC)
    assert (row.tested, row.words()["cache"]) == ((), "works untested")
    assert "no module map" in row.weights


@pytest.mark.parametrize(
    ("wrong", "said"), [("llama", "got a str"), (torch.nn.Linear(1, 1), "got a Linear")]
)
def test_anything_but_a_model_or_a_config_raises(wrong: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        supports(wrong, SPEC)


def test_a_config_that_no_model_is_made_of_says_why() -> None:
    with pytest.raises(ValueError, match="must make a model of the config of 'llama'; got R"):
        supports(CONFIG_MAPPING["llama"](vocab_size=-1), SPEC)


def test_a_refused_config_that_no_model_is_made_of_has_its_refusal() -> None:
    with pytest.raises(ValueError, match="'t5' is an encoder-decoder"):
        supports(CONFIG_MAPPING["t5"](), SPEC)
