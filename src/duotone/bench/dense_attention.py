"""16-bit attention of one query per sequence: the fastest kernel of torch for given tensors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

# Calls by which the fastest is chosen; by five, flash was taken twice where cuDNN is 7 % faster.
TRIALS = 20
Attention = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def _sdpa(backend: SDPBackend | None) -> Attention:
    def attend(query: Tensor, key: Tensor, value: Tensor, sm_scale: float) -> Tensor:
        if backend is None:
            return F.scaled_dot_product_attention(
                query, key, value, scale=sm_scale, enable_gqa=True
            )
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                query, key, value, scale=sm_scale, enable_gqa=True
            )

    return attend


def _two_products(query: Tensor, key: Tensor, value: Tensor, sm_scale: float) -> Tensor:
    rows = query.unflatten(1, (key.shape[1], -1)).squeeze(3)
    weights = (rows @ key.transpose(-1, -2) * sm_scale).softmax(-1)
    return (weights @ value).flatten(1, 2).unsqueeze(2)


def attention_choices(device: torch.device) -> dict[str, Attention]:
    """16-bit attention by name; on a GPU, the kernels that were measured fastest."""
    if device.type != "cuda":
        return {"sdpa": _sdpa(None), "two products": _two_products}
    return {
        "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
        "flash": _sdpa(SDPBackend.FLASH_ATTENTION),
        "two products": _two_products,
    }


def fastest_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Attention, str]:
    """(function, name) of the fastest on these tensors; kernels that cannot run are left out."""
    times: dict[str, float] = {}
    choices = attention_choices(query.device)
    if query.device.type != "cuda":
        return choices["sdpa"], "sdpa"
    for name, attend in choices.items():
        try:
            times[name] = _milliseconds(lambda attend=attend: attend(query, key, value, 0.1))
        except RuntimeError:  # not built, not for these shapes, or no memory for its workspace
            continue
    if not times:
        raise torch.OutOfMemoryError("no 16-bit attention fits next to this cache.")
    best = min(times, key=times.__getitem__)
    return choices[best], best


def _milliseconds(work: Callable[[], Tensor]) -> float:
    """The fastest of some calls."""
    work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TRIALS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return min(one.elapsed_time(other) for one, other in pairwise(marks))
