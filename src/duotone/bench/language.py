"""A lean decoder with random weights of a real shape: what a step costs without a framework.

Llama's structure (RMS norms, rotary embedding, grouped heads, gated MLP), fused projections, no
dropout, no biases. Attention and cache are given: the same model decodes on 16 bit and on few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.capacity import PREFILL_TOKENS, DecoderShape

ROPE_BASE = 1e6
EPSILON = 1e-5
HEAD_MULTIPLE = 64


class StepCache(Protocol):
    """What a decode step asks of a cache."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sm_scale: float
    ) -> Tensor:
        """Store one token per sequence and attend; shapes as `StaticDecoder.attend` has them."""
        ...


@dataclass(frozen=True)
class Layer:
    """Weights of one layer; qkv and gate_up are fused."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    norms: tuple[Tensor, Tensor]


class LanguageModel:
    """Random weights; every output of a layer has about the variance of its input.

    max_tokens: of a sequence, for the rotary tables. fuse: compile elementwise operations on a GPU.
    """

    def __init__(
        self, shape: DecoderShape, device: torch.device, max_tokens: int, fuse: bool = True
    ) -> None:
        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        heads = shape.q_heads + 2 * shape.kv_heads
        self.layers = [
            Layer(
                qkv=self._matrix(heads * shape.head_dim, shape.hidden),
                out=self._matrix(shape.hidden, shape.q_heads * shape.head_dim),
                gate_up=self._matrix(2 * shape.mlp, shape.hidden),
                down=self._matrix(shape.hidden, shape.mlp),
                norms=(self._ones(), self._ones()),
            )
            for _ in range(shape.layers)
        ]
        self.norm, self.embedding = self._ones(), self._matrix(shape.vocab, shape.hidden)
        # Rows that no product likes are filled up, as trained models do.
        self.head = self._matrix(-(-shape.vocab // HEAD_MULTIPLE) * HEAD_MULTIPLE, shape.hidden)
        self.cos, self.sin = self._rotation(max_tokens)
        self.ops = _elementwise(fuse and device.type == "cuda")

    def _matrix(self, rows: int, columns: int) -> Tensor:
        weights = torch.empty(rows, columns, dtype=self.dtype, device=self.device)
        return weights.normal_(std=columns**-0.5)

    def _ones(self) -> Tensor:
        return torch.ones(self.shape.hidden, dtype=self.dtype, device=self.device)

    def _rotation(self, tokens: int) -> tuple[Tensor, Tensor]:
        places = torch.arange(0, self.shape.head_dim, 2, device=self.device)
        rates = ROPE_BASE ** (-places / self.shape.head_dim)
        angles = torch.arange(tokens, device=self.device)[:, None] * rates
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices."""
        per_layer = [t for at in self.layers for t in (at.qkv, at.out, at.gate_up, at.down)]
        return sum(t.nbytes for t in (*per_layer, self.embedding, self.head))

    def step(self, tokens: Tensor, positions: Tensor, cache: StepCache) -> Tensor:
        """The next tokens [batch] after `tokens` [batch] at `positions` [batch], by argmax."""
        x = F.embedding(tokens, self.embedding)
        angles = (self.cos[positions][:, None], self.sin[positions][:, None])
        normed = self._normed(x, self.layers[0].norms[0])
        following = [*(layer.norms[0] for layer in self.layers[1:]), self.norm]
        for index, layer in enumerate(self.layers):
            query, key, value = self._heads(normed, layer, angles)
            states = (t.unsqueeze(2) for t in (query, key, value))
            attended = cache.attend(index, *states, self.shape.head_dim**-0.5)
            out = F.linear(attended.flatten(1), layer.out)
            x, normed = self.ops.add_norm(x, out, layer.norms[1])
            x, normed = self.ops.add_norm(x, self._mlp(normed, layer), following[index])
        return self._most_likely(normed)

    def prefill(self, tokens: Tensor, take: Callable[[int, Tensor, Tensor], None]) -> Tensor:
        """The next token [1] after a prompt `tokens` [n]; `take` gets K and V of each layer.

        K and V: [1, kv_heads, n, head_dim].
        """
        x = F.embedding(tokens, self.embedding)
        angles = (self.cos[: len(tokens), None], self.sin[: len(tokens), None])
        for index, layer in enumerate(self.layers):
            normed = self._normed(x, layer.norms[0])
            states = (t.transpose(0, 1)[None] for t in self._heads(normed, layer, angles))
            query, key, value = states
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            take(index, key, value)
            x = x + F.linear(attended[0].transpose(0, 1).flatten(1), layer.out)
            # In place: a second copy of a long prompt is what a small budget lacks.
            for part in x.split(PREFILL_TOKENS):
                part += self._mlp(self._normed(part, layer.norms[1]), layer)
        return self._most_likely(self._normed(x[-1:], self.norm))

    def _most_likely(self, normed: Tensor) -> Tensor:
        return F.linear(normed, self.head)[:, : self.shape.vocab].argmax(-1)

    def _heads(
        self, normed: Tensor, layer: Layer, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q, rotated k and v of rows [rows, hidden], each [rows, heads, head_dim]."""
        shape = self.shape
        qkv = F.linear(normed, layer.qkv)
        qkv = qkv.unflatten(-1, (-1, shape.head_dim))
        rotated, value = qkv.split([shape.q_heads + shape.kv_heads, shape.kv_heads], 1)
        rotated = self.ops.rotate(rotated, *angles)
        query, key = rotated.split([shape.q_heads, shape.kv_heads], 1)
        return query, key, value

    def _mlp(self, normed: Tensor, layer: Layer) -> Tensor:
        return F.linear(self.ops.gate(F.linear(normed, layer.gate_up)), layer.down)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return _norm(x, weight)


@dataclass(frozen=True)
class _Elementwise:
    rotate: Callable[[Tensor, Tensor, Tensor], Tensor]
    gate: Callable[[Tensor], Tensor]
    add_norm: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@cache
def _elementwise(fused: bool) -> _Elementwise:
    """Compiled they are one launch each instead of seven, two and two; for all caches alike."""
    functions = (_rotate, _gate, _add_norm)
    if not fused:
        return _Elementwise(*functions)
    return _Elementwise(*(torch.compile(f) for f in functions))


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by halves. x [rows, heads, head_dim]; cos, sin [rows, 1, head_dim / 2]."""
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _add_norm(x: Tensor, more: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """(sum, its RMS norm) of rows [rows, hidden]."""
    total = x + more
    return total, _norm(total, weight)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, EPSILON)


def _gate(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up
