"""Baselines of quantized attention: every backend of torch that attends to 16-bit K and V.

A backend is an entry of BASELINES. `prepare` brings K and V into its layout, which is not timed,
and returns the timed call. The math backend of SDPA is left out: 40 times slower than the rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Call = Callable[[], Tensor]
# Relative RMS and maximum error against fp64.
TOLERANCE = (1e-2, 5e-2)


class UnavailableError(Exception):
    """Error of a row that cannot be measured here; the message gives the reason."""


@dataclass(frozen=True)
class Baseline:
    """A backend.

    prepare: (query [batch, q_heads, 1, d], key and value [batch, kv_heads, n, d], sm_scale) to the
        call. The call returns [batch, q_heads, 1, d], q head after q head, or with the heads split:
        a copy to that shape would be timed too. Errors: UnavailableError.
    compiled: starts with seconds of compiling.
    """

    name: str
    prepare: Callable[[Tensor, Tensor, Tensor, float], Call]
    compiled: bool = False


def _as_rows(query: Tensor, kv_heads: int) -> Tensor:
    """The q heads of one kv head as its queries: without a mask, attention is the same."""
    return query.reshape(query.shape[0], kv_heads, -1, query.shape[3])


def _sdpa(
    backend: str, rows: bool, query: Tensor, key: Tensor, value: Tensor, sm_scale: float
) -> Call:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    chosen = SDPBackend.__members__[backend]
    given = _as_rows(query, key.shape[1]) if rows else query
    gqa = given.shape[1] != key.shape[1]

    def run() -> Tensor:
        with sdpa_kernel(chosen):
            return F.scaled_dot_product_attention(given, key, value, scale=sm_scale, enable_gqa=gqa)

    return run


def _matmuls(query: Tensor, key: Tensor, value: Tensor, sm_scale: float) -> Call:
    rows, transposed = _as_rows(query, key.shape[1]) * sm_scale, key.transpose(-1, -2)

    def run() -> Tensor:
        weights = torch.softmax(rows @ transposed, -1, dtype=torch.float32).to(value.dtype)
        return weights @ value

    return run


@cache
def _compiled_flex(*shapes: torch.Size) -> Any:
    """Compiled for these shapes alone: dynamo gives a function up after eight."""
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()
    return torch.compile(flex_attention, dynamic=False)


def _flex(query: Tensor, key: Tensor, value: Tensor, sm_scale: float) -> Call:
    if not query.is_cuda:
        raise UnavailableError("compiled flex attention is measured on CUDA devices only")
    flex = _compiled_flex(query.shape, key.shape)
    gqa = query.shape[1] != key.shape[1]
    return lambda: flex(query, key, value, scale=sm_scale, enable_gqa=gqa)


BASELINES = (
    Baseline("sdpa cudnn", partial(_sdpa, "CUDNN_ATTENTION", False)),
    Baseline("sdpa cudnn, heads as rows", partial(_sdpa, "CUDNN_ATTENTION", True)),
    Baseline("sdpa flash", partial(_sdpa, "FLASH_ATTENTION", False)),
    Baseline("sdpa flash, heads as rows", partial(_sdpa, "FLASH_ATTENTION", True)),
    # This backend takes no GQA.
    Baseline("sdpa efficient, heads as rows", partial(_sdpa, "EFFICIENT_ATTENTION", True)),
    Baseline("two matmuls", _matmuls),
    Baseline("flex, compiled", _flex, compiled=True),
)


@contextmanager
def quiet() -> Any:
    """Suppress the warnings of backends that decline."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
