"""Baselines of quantized attention: every backend that attends to 16-bit (or 8-bit) K and V.

A backend is an entry of BASELINES. `prepare` brings K and V into its layout, which is not timed,
and returns the timed call. The math backend of SDPA is left out: 40 times slower than the rest.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Call = Callable[[], Tensor]
PAGE_TOKENS = 16
WORKSPACE_BYTES = 128 << 20


class UnavailableError(Exception):
    """Error of a row that cannot be measured here; the message gives the reason."""


@dataclass(frozen=True)
class Baseline:
    """A backend.

    prepare: (query [batch, q_heads, 1, d], key and value [batch, kv_heads, n, d], sm_scale) to the
        call. The call returns [batch, q_heads, 1, d], q head after q head, or with the heads split:
        a copy to that shape would be timed too. Errors: UnavailableError.
    bits: of K and V. tolerance: relative RMS and maximum error against fp64.
    compiled: starts with seconds of compiling.
    """

    name: str
    prepare: Callable[[Tensor, Tensor, Tensor, float], Call]
    bits: int = 16
    tolerance: tuple[float, float] = (1e-2, 5e-2)
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


def _need(module: str, package: str) -> None:
    if find_spec(module) is None:
        raise UnavailableError(f"{package} is not installed")


def _flash2(query: Tensor, key: Tensor, value: Tensor, sm_scale: float) -> Call:
    _need("flash_attn", "flash-attn")
    from flash_attn import flash_attn_with_kvcache

    given, key, value = (x.transpose(1, 2).contiguous() for x in (query, key, value))

    def run() -> Tensor:
        return flash_attn_with_kvcache(given, key, value, softmax_scale=sm_scale).transpose(1, 2)

    return run


def _flash3(
    dtype: torch.dtype | None, query: Tensor, key: Tensor, value: Tensor, sm_scale: float
) -> Call:
    _need("flash_attn_interface", "FlashAttention-3")
    from flash_attn_interface import flash_attn_with_kvcache

    given, key, value = (x.transpose(1, 2).contiguous() for x in (query, key, value))
    if dtype is not None:
        given, key, value = (x.to(dtype) for x in (given, key, value))

    def run() -> Tensor:
        out = flash_attn_with_kvcache(given, key, value, softmax_scale=sm_scale)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def _flashinfer(
    dtype: torch.dtype | None, query: Tensor, key: Tensor, value: Tensor, sm_scale: float
) -> Call:
    """FlashInfer's batch decode on pages of 16 tokens, planned before and not timed."""
    _need("flashinfer", "flashinfer-python")
    import flashinfer

    (batch, q_heads, _, head_dim), kv_heads = query.shape, key.shape[1]
    if key.shape[2] % PAGE_TOKENS:
        raise UnavailableError(f"measured on whole pages of {PAGE_TOKENS} tokens")
    pages = key.shape[2] // PAGE_TOKENS
    stored = tuple(_paged(x).to(dtype or x.dtype) for x in (key, value))
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=query.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "HND", use_tensor_cores=True)
    index = {"dtype": torch.int32, "device": query.device}
    wrapper.plan(
        torch.arange(batch + 1, **index) * pages,
        torch.arange(batch * pages, **index),
        torch.full((batch,), PAGE_TOKENS, **index),
        q_heads,
        kv_heads,
        head_dim,
        PAGE_TOKENS,
        q_data_type=query.dtype,
        kv_data_type=stored[0].dtype,
        sm_scale=sm_scale,
    )
    rows = query[:, :, 0].contiguous()
    return lambda: wrapper.run(rows, stored).unsqueeze(2)


def _paged(x: Tensor) -> Tensor:
    """[batch, kv_heads, n, d] to [pages, kv_heads, page_tokens, d]."""
    return x.unflatten(2, (-1, PAGE_TOKENS)).transpose(1, 2).flatten(0, 1).contiguous()


FP8 = torch.float8_e4m3fn
FP8_TOLERANCE = (0.1, 0.3)
BASELINES = (
    Baseline("sdpa cudnn", partial(_sdpa, "CUDNN_ATTENTION", False)),
    Baseline("sdpa cudnn, heads as rows", partial(_sdpa, "CUDNN_ATTENTION", True)),
    Baseline("sdpa flash", partial(_sdpa, "FLASH_ATTENTION", False)),
    Baseline("sdpa flash, heads as rows", partial(_sdpa, "FLASH_ATTENTION", True)),
    # This backend takes no GQA.
    Baseline("sdpa efficient, heads as rows", partial(_sdpa, "EFFICIENT_ATTENTION", True)),
    Baseline("two matmuls", _matmuls),
    Baseline("flash-attn 2", _flash2),
    Baseline("flash-attn 3", partial(_flash3, None)),
    Baseline("flashinfer", partial(_flashinfer, None), compiled=True),
    Baseline("flash-attn 3 fp8", partial(_flash3, FP8), bits=8, tolerance=FP8_TOLERANCE),
    Baseline(
        "flashinfer fp8", partial(_flashinfer, FP8), bits=8, tolerance=FP8_TOLERANCE, compiled=True
    ),
    Baseline("flex, compiled", _flex, compiled=True),
)


@contextmanager
def quiet() -> Any:
    """Suppress the warnings of backends that decline."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
