import logging

import pytest
import torch
import transformers
from jaxtyping import Float
from torch import Tensor

from duotone.cache import BlockTable, PackedTensor
from duotone.quant import TensorSpec
from duotone.quant.rotation import into_basis

transformers.logging.set_verbosity(logging.ERROR)


class ExactTensor(PackedTensor):
    """An exact codec: the 'codes' are the bytes of fp32 numbers, scale is 1, zero_point 0."""

    def signed_codes(self, dtype: torch.dtype) -> Tensor:
        return self.codes.contiguous().view(torch.float32).to(dtype)


def exact_pack(
    x: Float[Tensor, "batch kv_heads tokens head_dim"],
    spec: TensorSpec,
    spans: BlockTable,
    decoding: bool = False,
) -> ExactTensor:
    dtype = x.dtype
    x = into_basis(x.float(), spec.transform)
    blocks = spans.split(spec.group)
    per_token = spec.along == "channels"
    rows = x.shape[2] if per_token else blocks.blocks
    groups = -(-x.shape[3] // (spec.group or x.shape[3])) if per_token else x.shape[3]
    shape = (*x.shape[:2], rows, groups)
    return ExactTensor(
        spec=spec,
        head_dim=x.shape[3],
        dtype=dtype,
        blocks=blocks,
        codes=x.contiguous().view(torch.uint8),
        scale=torch.ones(shape),
        zero_point=torch.zeros(shape),
    )


@pytest.fixture
def exact_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything about the cache is real but the rounding."""
    monkeypatch.setattr("duotone.cache.pair.pack_tensor", exact_pack)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
