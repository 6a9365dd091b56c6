"""A lean decoder with random weights of a real shape, to time a step without a framework.

Llama's structure (RMS norms, rotary embedding, grouped heads, gated MLP), fused projections, no
dropout, no biases. Attention and cache are given: the same model decodes on 16 bit and on few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.bench.linears import (
    DenseLinears,
    IntegerLinears,
    Linears,
    elementwise,
    rms_norm,
)
from duotone.planning.capacity import PREFILL_TOKENS
from duotone.planning.shapes import DecoderShape
from duotone.planning.step_time import WEIGHT_BITS

ROPE_BASE = 1e6
HEAD_MULTIPLE = 64


class StepCache(Protocol):
    """Interface of a cache in a decode step."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sm_scale: float
    ) -> Tensor:
        """Store one token per sequence and attend; shapes as `StaticDecoder.attend` has them."""
        ...


@dataclass(frozen=True)
class Layer:
    """Weights of one layer, made by `Linears`; qkv and gate_up are fused."""

    qkv: Any
    out: Any
    gate_up: Any
    down: Any
    norms: tuple[Tensor, Tensor]


class LanguageModel:
    """Random weights; every output of a layer has about the variance of its input.

    max_tokens: of a sequence, for the rotary tables. fuse: compile elementwise operations on a GPU.
    weights: a key of WEIGHT_BITS, of the layers; embedding and head have 16 bit.
    """

    def __init__(
        self,
        shape: DecoderShape,
        device: torch.device,
        max_tokens: int,
        fuse: bool = True,
        weights: str = "bf16",
    ) -> None:
        self.shape, self.device, self.weights = shape, device, weights
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        fused = fuse and device.type == "cuda"
        self.rotate = elementwise(fused).rotate
        self.dense = DenseLinears(device, self.dtype, fused)
        self.linears: Linears = self.dense
        if weights != "bf16":
            self.linears = IntegerLinears(device, self.dtype, WEIGHT_BITS[weights], shape.mlp)
        heads, matrix = shape.q_heads + 2 * shape.kv_heads, self.linears.matrix
        self.layers = [
            Layer(
                qkv=matrix(heads * shape.head_dim, shape.hidden),
                out=matrix(shape.hidden, shape.q_heads * shape.head_dim),
                gate_up=matrix(2 * shape.mlp, shape.hidden),
                down=matrix(shape.hidden, shape.mlp),
                norms=(self._ones(), self._ones()),
            )
            for _ in range(shape.layers)
        ]
        self.norm, self.embedding = self._ones(), self.dense.matrix(shape.vocab, shape.hidden)
        # Odd numbers of rows are filled up, as in trained models.
        rows = -(-shape.vocab // HEAD_MULTIPLE) * HEAD_MULTIPLE
        self.head = self.dense.matrix(rows, shape.hidden)
        self.cos, self.sin = self._rotation(max_tokens)

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
        entering = self.linears.norm(x, self.layers[0].norms[0])
        # The head after the last layer is 16 bit.
        following = [(self.linears, layer.norms[0]) for layer in self.layers[1:]]
        following.append((self.dense, self.norm))
        for index, layer in enumerate(self.layers):
            query, key, value = self._heads(entering, layer, angles)
            states = (t.unsqueeze(2) for t in (query, key, value))
            attended = cache.attend(index, *states, self.shape.head_dim**-0.5)
            out = self._out(attended.flatten(1), layer)
            x, entering = self.linears.add_norm(x, out, layer.norms[1])
            linears, norm = following[index]
            x, entering = linears.add_norm(x, self._mlp(entering, layer), norm)
        return self._most_likely(entering)

    def prefill(self, tokens: Tensor, take: Callable[[int, Tensor, Tensor], None]) -> Tensor:
        """The next token [1] after a prompt `tokens` [n]; `take` gets K and V of each layer.

        K and V: [1, kv_heads, n, head_dim].
        """
        x = F.embedding(tokens, self.embedding)
        angles = (self.cos[: len(tokens), None], self.sin[: len(tokens), None])
        for index, layer in enumerate(self.layers):
            entering = self.linears.norm(x, layer.norms[0])
            states = (t.transpose(0, 1)[None] for t in self._heads(entering, layer, angles))
            query, key, value = states
            attended = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            take(index, key, value)
            x = x + self._out(attended[0].transpose(0, 1).flatten(1), layer)
            # In place: a small budget has no room for a second copy of a long prompt.
            for part in x.split(PREFILL_TOKENS):
                part += self._mlp(self.linears.norm(part, layer.norms[1]), layer)
        return self._most_likely(rms_norm(x[-1:], self.norm))

    def _most_likely(self, normed: Tensor) -> Tensor:
        return F.linear(normed, self.head)[:, : self.shape.vocab].argmax(-1)

    def _heads(
        self, entering: Tensor, layer: Layer, angles: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q, rotated k and v of rows [rows, hidden], each [rows, heads, head_dim]."""
        shape = self.shape
        qkv = self.linears.product(entering, layer.qkv)
        qkv = qkv.unflatten(-1, (-1, shape.head_dim))
        rotated, value = qkv.split([shape.q_heads + shape.kv_heads, shape.kv_heads], 1)
        query, key = self.rotate(rotated, *angles, shape.q_heads)
        return query, key, value

    def _out(self, attended: Tensor, layer: Layer) -> Tensor:
        return self.linears.product(self.linears.plain(attended), layer.out)

    def _mlp(self, entering: Tensor, layer: Layer) -> Tensor:
        return self.linears.product(self.linears.gated(entering, layer.gate_up), layer.down)
