"""Schemes that every search measures, in addition to the points of its space."""

import pytest

from duotone.hf.model.facts import model_facts
from duotone.hf.recommended import recommend
from duotone.tune.seeds import PUBLISHED, known_specs
from tiny_vlm import tiny_model

from families import tiny_model as tiny_family


@pytest.mark.parametrize("family", ["internvl", "llama"])
def test_the_recommended_spec_is_known_and_not_a_published_one(family: str) -> None:
    model = tiny_model() if family == "internvl" else tiny_family(family)
    chosen = recommend(model)
    label = chosen.name.replace("@", " @")
    known = known_specs(model_facts(model), has_pictures=family == "internvl")
    assert known[label] == chosen.spec
    assert label not in PUBLISHED
