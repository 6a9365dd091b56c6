"""Text that a model writes on a GPU: the same for the same seed, and no random state is touched."""

import pytest
import torch

from duotone.calibrate.written import Written
from duotone.loading import Loaded
from tiny_text import text_model

pytestmark = pytest.mark.gpu


def test_random_states_of_the_device_stay_as_they_are() -> None:
    loaded = Loaded("words", text_model().cuda(), None)
    torch.cuda.manual_seed(3)
    before = torch.cuda.get_rng_state()
    first, again = (Written(24).encoded(loaded, 3).prompts for _ in range(2))
    assert torch.equal(torch.cuda.get_rng_state(), before)
    for one, other in zip(first, again, strict=True):
        assert one["input_ids"].device.type == "cpu"
        assert torch.equal(one["input_ids"], other["input_ids"])
