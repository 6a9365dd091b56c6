"""A stream of text on a real GPU: the host runs ahead of it through the layers of a step."""

import pytest
import torch
from cuda_device import NEEDS_KERNELS, no_waits
from parts_cases import LAYERS
from stream_cases import NAMES, STEPS, STREAMS, Conversation

from duotone.quant.checks import Checks

pytestmark = NEEDS_KERNELS


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", STREAMS)
def test_layers_after_the_second_never_wait_for_the_device(policy, name, step) -> None:
    Conversation(STREAMS[policy], name, STEPS[step]).apply(range(2))  # compiles kernels
    given = Conversation(STREAMS[policy], name, STEPS[step])
    given.apply(range(2))
    with no_waits():
        given.apply(range(2, LAYERS))
    given.checks.settle()
    assert all(store.stream.records is not None for store in given.stores)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
@pytest.mark.parametrize("which", ["key", "value"])
def test_numbers_that_do_not_fit_show_at_the_end_of_the_step(which: str, bad: float) -> None:
    given = Conversation(STREAMS["stream@2, 96 recent"], "ragged", None)
    getattr(given, which)[0, 1, 700, 3] = bad
    given.apply(range(LAYERS))
    with pytest.raises(ValueError, match="K or V of the text stream"):
        given.checks.settle()


def test_checks_of_several_devices_are_made_together() -> None:
    checks = Checks()
    checks.add(torch.tensor(1.0, device="cuda"), "first")
    checks.add(torch.tensor(torch.inf), "second")
    with pytest.raises(ValueError, match="second"):
        checks.settle()
