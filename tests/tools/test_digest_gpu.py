"""Digests on a real GPU are those of a CPU."""

import pytest
import torch

from duotone.tools import digest as module
from duotone.tools.digest import digest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("chunk", [64, 1 << 23])
def test_devices_agree(chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(module, "LARGE_CHUNK", chunk)
    torch.manual_seed(0)
    x = torch.randn(3, 1001, 7)
    given = {"a": x, "b": x.half()[1:], "c": x.to(torch.float8_e4m3fn)[:, 1:], "d": x.bool()}
    assert digest(given) == digest({name: tensor.cuda() for name, tensor in given.items()})
