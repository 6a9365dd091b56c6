"""Models in float64 all the way: transformers' norms and rotary embeddings use float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duotone.weights.equivalences.norms import RMSNorm, norm_parts

FP64, FP32 = 1e-9, 1e-5


def exact_norms(model: nn.Module) -> nn.Module:
    """Every RMSNorm that rounds to float32 replaced by one that does not."""
    for path, module in list(model.named_modules()):
        if type(module).__name__.endswith("RMSNorm") and not isinstance(module, RMSNorm):
            parts = norm_parts(module)
            model.set_submodule(path, RMSNorm(parts.eps, parts.weight.to(module.weight)))
    return model


def rounding_as(dtype: torch.dtype) -> AbstractContextManager[None]:
    """No rounding to float32 for float64 models; others run as they are."""
    return no_rounding() if dtype == torch.float64 else nullcontext()


@contextmanager
def no_rounding() -> Iterator[None]:
    """`x.float()` and `x.to(float32)` leave float64 as it is; integers become float64."""
    plain, plain_to, sample = Tensor.float, Tensor.to, F.grid_sample
    narrow = (torch.float16, torch.bfloat16, torch.float32)

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        rounds = torch.float32 in (*args, kwargs.get("dtype")) and x.dtype == torch.float64
        return x if rounds else plain_to(x, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "float", lambda x: plain(x) if x.dtype in narrow else x.double())
        patch.setattr(Tensor, "to", to)
        # GLM-4V samples its positions at coordinates that were made in float32.
        patch.setattr(F, "grid_sample", lambda x, at, **how: sample(x, at.type(x.dtype), **how))
        yield


def scramble(model: nn.Module, seed: int = 0) -> nn.Module:
    """Norm weights and biases, biases and LayerScales as no initialisation leaves them."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 or "token" in name or "position" in name:
            noise = torch.randn(parameter.shape, generator=generator).to(parameter)
            centre = 1.0 if "norm" in name and name.endswith("weight") else 0.2
            parameter.data.copy_(centre + 0.3 * noise)
    return model


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    return float(((ours - theirs).abs().max() / theirs.abs().max()).detach())


def assert_same(ours: Tensor, theirs: Tensor, tolerance: float = FP64) -> None:
    error = relative_error(ours, theirs)
    assert error <= tolerance, f"relative error {error:.1e} > {tolerance:.0e}"
