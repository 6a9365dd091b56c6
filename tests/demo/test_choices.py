import pytest

import duotone
from duotone.demo.choices import Choices
from duotone.loading import Loaded
from tiny_vlm import TinyProcessor, tiny_model


@pytest.fixture(scope="module")
def loaded():
    return Loaded("tiny", tiny_model(), TinyProcessor())


def test_every_registered_scheme_is_listed_with_the_widths_that_it_takes(loaded):
    listed = {choice["name"]: choice for choice in Choices(loaded).to_list()}
    assert list(listed) == list(duotone.schemes())
    assert (listed["kivi"]["bits"], listed["kivi"]["default"]) == ((1, 2, 3, 4, 8), 2)
    assert (listed["asymkv"]["bits"], listed["asymkv"]["default"]) == ((), None)
    assert listed["duotone"]["refused"] == ""
    assert "belong to a model" in listed["duotone-klt"]["refused"]
    assert all("spec" not in choice for choice in listed.values())


def test_gives_the_spec_of_a_scheme_at_some_bits(loaded):
    choices = Choices(loaded)
    assert choices.spec("minmax", 3) == duotone.scheme("minmax", bits=3)
    assert choices.spec("kivi", None) == choices.spec("kivi", 2) == duotone.scheme("kivi")


def test_a_spec_is_found_among_the_registered_ones_or_joins_them(loaded):
    choices = Choices(loaded)
    four, changed = duotone.scheme("kivi", bits=4), duotone.scheme("kivi").replace(recent=64)
    assert choices.add("kivi@4", four) == ("kivi", 4)
    assert choices.add("kivi", four) == ("kivi", 4)
    assert choices.add("kivi", duotone.scheme("kivi")) == ("kivi", None)
    assert choices.add("asymkv", duotone.scheme("asymkv")) == ("asymkv", None)
    assert len(choices.to_list()) == len(duotone.schemes())
    assert choices.add("kivi@2", changed) == ("kivi@2, changed", None)
    assert choices.add("mine.json", four) == ("mine.json", None)
    assert [choice["name"] for choice in choices.to_list()[:2]] == ["mine.json", "kivi@2, changed"]
    assert choices.spec("kivi@2, changed", None) == changed


@pytest.mark.parametrize(
    "wrong",
    [("nothing", 1), (["kivi"], 1), ("kivi", 5), ("kivi", "2"), ("kivi", True), ("asymkv", 2)],
)
def test_refuses_unknown_schemes_and_bits(loaded, wrong):
    with pytest.raises(ValueError, match="got"):
        Choices(loaded).spec(*wrong)
