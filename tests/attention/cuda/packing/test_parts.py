"""Host code of packing pictures in two parts, without a GPU: nothing is launched."""

import pytest
import torch
from no_launches import leave_out_launches
from no_questions import NoQuestions
from parts_cases import LAYERS, PARTS, PROMPTS, SPECS, Prompt, masks

# Operations of torch in a layer that make no view: room for results counts, launches do not.
MOST = {
    "parts": 54,
    "two bits": 54,
    "short ones whole": 54,
    "short ones in steps": 54,
    "first layer": 54,
    "basis": 64,
    "spans": 26,
}
# In canonical order.
MOST_SHORT = 36
# Where they join others.
MOST_LATER = {"short": 54, "some": 70}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of kernels that would have been launched, by the host code of CUDA tensors."""
    return leave_out_launches(monkeypatch)


def test_a_back_of_one_width_is_packed_by_kernels(launches) -> None:
    """In the first layer of the preset of 2 bits; its levels are searched as others' are."""
    prompt = Prompt(SPECS["two bits"], "one")
    prompt.apply(range(1))
    back = prompt.stores[0].background
    assert launches.count("class_pack") == launches.count("span_pack") == 1
    assert launches.count("level_search") == 4
    assert (back.records.format.small, back.key.scale.dtype) == (True, torch.uint8)


@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("policy", SPECS)
def test_layers_after_the_second_ask_the_host_nothing(policy: str, name: str, launches) -> None:
    """The first layer, and the first one without a rule of its own, find what all layers share."""
    prompt = Prompt(SPECS[policy], name)
    prompt.apply(range(2))
    before = len(launches)
    with NoQuestions() as layers:
        prompt.apply(range(2, LAYERS))
    assert len(launches) >= before + 4 * (LAYERS - 2)
    assert all(store.background.records is not None for store in prompt.stores)
    assert layers.computed <= MOST[policy] * (LAYERS - 2)


@pytest.mark.parametrize("policy", ["parts", "two bits"])
def test_short_pictures_ask_the_host_nothing_either(policy: str, launches) -> None:
    """Kernels find their levels and codes."""
    prompt = Prompt(SPECS[policy], "short")
    prompt.apply(range(2))
    before = len(launches)
    with NoQuestions() as layers:
        prompt.apply(range(2, LAYERS))
    assert len(launches) >= before + 4 * (LAYERS - 2)
    assert all(store.visual.records is None for store in prompt.stores)
    assert layers.computed <= MOST_SHORT * (LAYERS - 2)


@pytest.mark.parametrize("name", ["short", "some"])
def test_pictures_of_a_later_turn_ask_the_host_nothing(name: str, launches) -> None:
    """Kernels pack them; then they are copied after those of the first turn."""
    prompt = Prompt(PARTS, name)
    prompt.apply(range(LAYERS))
    prompt.begin(*masks(name))
    prompt.apply(range(2))
    before = len(launches)
    with NoQuestions() as layers:
        prompt.apply(range(2, LAYERS))
    assert len(launches) >= before + 4 * (LAYERS - 2)
    assert layers.computed <= MOST_LATER[name] * (LAYERS - 2)
