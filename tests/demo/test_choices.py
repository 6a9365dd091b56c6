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
    own = duotone.scheme("kivi", bits=4)
    choices = Choices(loaded, {"mine.json": own})
    assert choices.to_list()[0]["name"] == "mine.json"
    assert choices.spec("mine.json", None) == own
    assert choices.spec("minmax", 3) == duotone.scheme("minmax", bits=3)
    assert choices.spec("kivi", None) == choices.spec("kivi", 2) == duotone.scheme("kivi")


@pytest.mark.parametrize(
    "wrong",
    [("nothing", 1), (["kivi"], 1), ("kivi", 5), ("kivi", "2"), ("kivi", True), ("asymkv", 2)],
)
def test_refuses_unknown_schemes_and_bits(loaded, wrong):
    with pytest.raises(ValueError, match="got"):
        Choices(loaded).spec(*wrong)
