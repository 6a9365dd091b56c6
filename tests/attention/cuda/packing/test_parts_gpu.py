"""Pictures in two parts on a real GPU: the host runs ahead of it through a prompt's layers."""

import pytest
from cuda_device import NEEDS_KERNELS, no_waits
from parts_cases import LAYERS, PROMPTS, SPECS, Prompt

pytestmark = NEEDS_KERNELS


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", PROMPTS)
@pytest.mark.parametrize("policy", SPECS)
def test_layers_after_the_second_never_wait_for_the_device(policy: str, name: str) -> None:
    """The first layer, and the first one without a rule of its own, find what all layers share."""
    Prompt(SPECS[policy], name).apply(range(2))  # compiles kernels
    prompt = Prompt(SPECS[policy], name)
    prompt.apply(range(2))
    with no_waits():
        prompt.apply(range(2, LAYERS))
    prompt.checks.settle()
    for store in prompt.stores:
        assert store.visual.records is not None
        assert store.background.records is not None
