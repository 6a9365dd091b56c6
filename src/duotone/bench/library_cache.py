"""transformers' own quantized cache as a row of the throughput table.

This cache keeps few bits and attends in 16. Each step dequantizes every layer, appends the new
token and calls dense attention. So the cache saves memory, not time, and its Python cannot be
captured in a graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from duotone.bench.caches import Steady
from duotone.bench.dense_attention import fastest_attention
from duotone.planning.shapes import DecoderShape, Load

# Arguments of `transformers.QuantizedCache`, in addition to its defaults (groups of 64, a window of
# 128). HQQ's groups are along channels here: by default, groups reach over sequences.
BACKENDS: dict[str, dict[str, int]] = {
    "quanto": {"nbits": 2},
    "hqq": {"nbits": 2, "axis_key": 1, "axis_value": 1},
    "fp8": {},
}


class LibraryCache(Steady):
    """`transformers.QuantizedCache` of a batch in the middle of its generation, where it stays.

    The cache quantizes everything anew whenever its window is full, each 128 tokens. Only steps
    between are timed, in the cache's favour.
    Errors: ValueError for a backend that is not in BACKENDS; ImportError if it is not installed.
    """

    captures = False

    def __init__(
        self,
        shape: DecoderShape,
        backend: str,
        load: Load,
        batch: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"backends are {sorted(BACKENDS)}; got {backend!r}")
        self.shape, self.backend = shape, backend
        self.cache = self._empty()
        tokens = load.visual + load.prompt + load.new // 2
        for layer in range(shape.layers):
            self._put(layer, batch, tokens, device, dtype)
            self._put(layer, batch, 1, device, dtype)
        query = torch.randn(batch, shape.q_heads, 1, shape.head_dim, device=device, dtype=dtype)
        states = self.cache.update(query[:, : shape.kv_heads], query[:, : shape.kv_heads], 0)
        self._attend, name = fastest_attention(query, *states)
        self.attention = f"{backend}, {name}"

    def _empty(self) -> Any:
        from transformers import LlamaConfig, QuantizedCache

        config = LlamaConfig(num_hidden_layers=self.shape.layers)
        return QuantizedCache(self.backend, config, **BACKENDS[self.backend])

    def _put(
        self, layer: int, batch: int, tokens: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        size = (batch, self.shape.kv_heads, tokens, self.shape.head_dim)
        states = torch.randn(2, *size, device=device, dtype=dtype)
        self.cache.update(*states, layer)

    @property
    def nbytes(self) -> int:
        """Bytes that the cache keeps between steps."""
        names = ("_quantized_keys", "_quantized_values", "keys", "values")
        return sum(kept_bytes(getattr(at, name)) for at in self.cache.layers for name in names)

    def jump(self, generated: int) -> None:
        """Do nothing: the cache stays in its state."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, sm_scale: float
    ) -> Tensor:
        """Dequantize everything, attend."""
        return self._attend(query, *self.cache.update(key, value, layer), sm_scale)

    def take_prompt(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Quantize one sequence's prompt, which is not kept."""
        if layer == 0:
            self._prompt = self._empty()
        self._prompt.update(key, value, layer)


def kept_bytes(held: Any) -> int:
    """Bytes of a tensor, of a wrapper subclass's inner tensors, or of a collection's tensors."""
    if isinstance(held, dict):
        held = tuple(held.values())
    if isinstance(held, tuple):
        return sum(map(kept_bytes, held))
    if hasattr(held, "__tensor_flatten__"):
        return sum(kept_bytes(getattr(held, name)) for name in held.__tensor_flatten__()[0])
    return held.nbytes if isinstance(held, Tensor) else 0
