"""Calls on a CPU, chosen for as on an H200 with Triton; the reference plays Triton's part."""

import sys
from types import SimpleNamespace

import pytest
import torch

from duotone.attention import Shape, attend, choice, dispatch
from duotone.attention.cuda.shared import runtime


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends. Launches of CUDA kernels fail, or are caught by the test."""
    monkeypatch.setattr(dispatch, "on_gpu", lambda query: True)
    monkeypatch.setattr(runtime, "missing", lambda device: None)
    monkeypatch.setattr(runtime, "is_untried", lambda device: False)
    monkeypatch.setattr(choice, "first_refusal", lambda query, kv: None)
    monkeypatch.setattr(dispatch, "no_triton", lambda device: None)
    triton = SimpleNamespace(
        decode_attention_triton=lambda query, kv, **given: attend(query, kv, **given)
    )
    monkeypatch.setitem(sys.modules, "duotone.attention.triton.decode", triton)


def single_precision(head_dim: int, q_heads: int, kv_heads: int, dtype: torch.dtype) -> Shape:
    """The shape of a layer in fp32, for models in fp64: kernels read no fp64."""
    return Shape(head_dim, q_heads, kv_heads, torch.float32)
