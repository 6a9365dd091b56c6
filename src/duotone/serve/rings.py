"""Rings of requests as vLLM sees them: layers of their own, with a block per request.

Tokens of a page that is not full yet are in ring pages (`pages`).
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheSpec, KVQuantMode

from duotone.serve.layers import say_held
from duotone.serve.pages import PageLayout


class Ring(nn.Module, AttentionLayerBase):
    """Pages of every request's ring in one layer, as vLLM sees them: a layer of its own."""

    def __init__(self, name: str, number: int, layer: nn.Module, layout: PageLayout) -> None:
        super().__init__()
        self.layer_name, self.number, self.layout = name, number, layout
        self.backend, self.num_kv_heads = layer.attn_backend, layer.num_kv_heads
        self.pages, self.kv_cache = 1, torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend of rings."""
        return self.backend.of_rings()

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec | None:
        """Pages as large as those of the layer; None where rings before have enough of them.

        The number of the ring keeps vLLM from putting rings into one group, which it would split
        otherwise than the layers.
        """
        block_size = vllm_config.cache_config.block_size * self.backend.stretch
        self.pages = block_size // self.layout.tokens
        if self.number * self.pages >= self.layout.rings:
            return None
        if self.number == 0:
            say_held(vllm_config, self.backend.get_impl_cls())
        return CircularBufferSpec(
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.layout.head_dim,
            head_size_v=self.number,
            dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.CUSTOM,
            state_content_bytes=self.layout.token_bytes,
            dcp_sharded=False,
        )
