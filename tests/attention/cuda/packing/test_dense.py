"""Heads and types that no kernel of tiles writes."""

import pytest
import torch

from duotone.attention.cuda.packing import dense
from duotone.attention.refused import RefusedError


def test_what_no_kernel_writes_is_refused() -> None:
    dense.check("records", 64, torch.float16)
    with pytest.raises(RefusedError, match="float64"):
        dense.check("records", 64, torch.float64)
    with pytest.raises(RefusedError, match="even head_dim"):
        dense.check("records", 65, torch.float16)
