"""`StaticDecoder`: a flush at every step moves the groups that the host's schedule moves."""

import pytest
import torch
from begun import begin

import duotone
from duotone.attention.static import StaticDecoder

from frozen_decoder import Heads, Tokens, frozen_decoder

SHAPE = Heads(2, 4, 2, 16)
SPEC = duotone.scheme("kivi", bits=2).replace(recent=16)
STEPS = 80


def decoder() -> StaticDecoder:
    torch.manual_seed(0)
    return frozen_decoder(SHAPE, SPEC, Tokens(40, 9, STEPS), 2, impl="reference")


def decode(
    at: StaticDecoder, monkeypatch: pytest.MonkeyPatch, always_flush: bool = False
) -> tuple[torch.Tensor, int]:
    """(outputs of all steps and layers, flushes)."""
    flushes, outputs = 0, []
    plain = at.flush

    def counted() -> None:
        nonlocal flushes
        flushes += 1
        plain()

    monkeypatch.setattr(at, "flush", counted)
    torch.manual_seed(1)
    for _ in range(STEPS):
        _begin(at, always_flush)
        for layer in range(SHAPE.layers):
            query = torch.randn(2, SHAPE.q_heads, 1, SHAPE.head_dim)
            states = torch.randn(2, 2, SHAPE.kv_heads, 1, SHAPE.head_dim)
            outputs.append(at.attend(layer, query, *states, 0.3))
    return torch.stack(outputs), flushes


def _begin(at: StaticDecoder, always_flush: bool) -> None:
    if always_flush:
        at.flush()
        at.advance()
    else:
        begin(at)


def test_host_and_device_flush_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduled, blind = decoder(), decoder()
    ours, flushes = decode(scheduled, monkeypatch)
    theirs, every = decode(blind, monkeypatch, always_flush=True)
    assert torch.equal(ours, theirs)
    assert (flushes, every) == (2, STEPS)


def test_a_missed_flush_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = decoder(), decoder()
    monkeypatch.setattr(wrong, "is_due", lambda step: False)
    with pytest.raises((IndexError, RuntimeError)):
        decode(wrong, monkeypatch)
    assert decode(right, monkeypatch)[1] == 2
