"""Calls on a CPU, chosen for as on an H200 with Triton; the reference plays Triton's part."""

import sys
from types import SimpleNamespace

import pytest

from duotone.attention import attend, dispatch
from duotone.attention.cuda import decode
from duotone.attention.cuda.shared import runtime
from duotone.attention.cuda.spans import decode as span_decode


def pretend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the test ends. Launches of CUDA kernels fail, or are caught by the test."""
    monkeypatch.setattr(dispatch, "on_gpu", lambda query: True)
    for module in (decode, runtime):
        monkeypatch.setattr(module, "missing", lambda device: None)
    monkeypatch.setattr(runtime, "is_untried", lambda device: False)
    for module in (dispatch, decode):
        monkeypatch.setattr(module, "find_spec", lambda name: object())
    monkeypatch.setattr(span_decode, "multiprocessors", lambda device: 132)
    triton = SimpleNamespace(
        unsupported=lambda query, kv: None,
        decode_attention_triton=lambda query, kv, **given: attend(query, kv, **given),
    )
    monkeypatch.setitem(sys.modules, "duotone.attention.triton.decode", triton)
