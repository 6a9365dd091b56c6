"""Attention of a layer on duotone's pages in vLLM: K and V of a step are kept, then read."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from duotone.attention.cuda.shared.runtime import has_kernels
from duotone.serve.flash import flash
from duotone.serve.layers import OwnAttention, bits_of, stretch_of, widths_of
from duotone.serve.metadata import RING, PagesMetadata
from duotone.serve.pages import Chunk, PageLayout
from duotone.serve.plugin import DTYPES
from duotone.serve.prepared import prepare, scratch_of
from duotone.serve.ragged import RaggedChunks, RaggedStep, refusal
from duotone.serve.refusals import check_dtype, check_kind, check_layer, check_options
from duotone.serve.rings import Ring


class PagesAttention(AttentionImpl):
    """Attention of one layer on its pages; of a skipped layer, it makes way for vLLM's own.

    Errors: ValueError for what is not served.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **other: Any,
    ) -> None:
        config = get_current_vllm_config()
        widths_of(config)
        self._layers = config.compilation_config.static_forward_context
        self._config, self.kv_cache_dtype, self.own = config, kv_cache_dtype, None
        check_dtype(config)
        if kv_cache_dtype == "auto":
            given = (num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window)
            more = (kv_cache_dtype, logits_soft_cap, attn_type, kv_sharing_target_layer_name)
            self.own = OwnAttention((*given, *more), other, config)
            return
        refused = {
            "ALiBi slopes": alibi_slopes is not None,
            "a sliding window": sliding_window is not None,
            "a soft cap of logits": bool(logits_soft_cap),
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "K and V of another layer": kv_sharing_target_layer_name is not None,
            **{f"{name}": given is not None for name, given in other.items()},
        }
        check_layer([name for name, is_there in refused.items() if is_there])
        check_options(config)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self._seen, self.steps, self.scratch = 0, None, None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Give the layer its width and rings: vLLM asks layers for their caches after this."""
        name, layer = next(
            (n, x) for n, x in self._layers.items() if getattr(x, "impl", None) is self
        )
        check_kind(layer)
        if self.own is not None:
            bits = DTYPES[self._config.cache_config.cache_dtype]
            self.own.take(layer, self._layout(bits, layer.head_size), act_dtype)
            return
        sizes = {
            n: (self._layout(bits_of(self._config, n), x.head_size), x.num_kv_heads)
            for n, x in self._layers.items()
            if isinstance(getattr(x, "impl", None), PagesAttention) and x.impl.own is None
        }
        self.layout, heads = sizes[name]
        all_bytes = {x.token_bytes * heads for x, heads in sizes.values()}
        stretch = stretch_of(self.layout.token_bytes * heads, all_bytes)
        layer.attn_backend = layer.attn_backend.of(self.layout, stretch)
        for ring in range(self.layout.rings):
            added = f"{name}{RING}{ring}"
            # Weights that are loaded anew find the rings of before, which have their memory.
            if added not in self._layers:
                self._layers[added] = Ring(added, ring, layer, self.layout)

    def _layout(self, bits: int, head_dim: int) -> PageLayout:
        return PageLayout(bits, head_dim, self._config.model_config.dtype)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: PagesMetadata | None,
        output: Tensor | None = None,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of a step's tokens; their K and V are kept.

        query: [tokens, num_heads, head_size]. key, value: [tokens, num_kv_heads, head_size].
        """
        if attn_metadata is None:
            self._reserve(query.device)
            return output.fill_(0)
        count, step = attn_metadata.decodes, attn_metadata.step
        if kv_cache.data_ptr() != self._seen:
            self._check(layer, kv_cache)
        out = output.view(-1, self.num_heads, self.head_size)
        chunks = self._chunks(layer, (query, key, value), kv_cache, attn_metadata)
        # Requests of a step may share pages that are full only now: all is kept, then read.
        if count:
            step.store(kv_cache, key[:count], value[:count])
        for chunk in chunks:
            chunk.open()
        for chunk in chunks:
            chunk.keep()
        if count:
            table = attn_metadata.block_table[:count].contiguous()
            step.attend(kv_cache, table, query[:count], self.scale, out[:count])
        for chunk in chunks:
            out[chunk.first : chunk.end] = chunk.attend(self.scale)
        return output

    def _chunks(
        self,
        layer: Any,
        states: tuple[Tensor, Tensor, Tensor],
        pool: Tensor,
        metadata: PagesMetadata,
    ) -> list[Chunk | RaggedChunks]:
        """Chunks of prompts: together by kernels, otherwise a request each."""
        if not metadata.rows:
            return []
        rows, table, slots = metadata.rows, metadata.block_table, metadata.slots
        if (scratch := self._reserve(pool.device)) is not None:
            heads = (self.num_kv_heads, self.num_heads // self.num_kv_heads)
            if heads not in metadata.ragged:
                given = (rows, table, self._blocks(layer), slots)
                metadata.ragged[heads] = RaggedStep(self.layout, *heads, *given)
            return [RaggedChunks(metadata.ragged[heads], pool, states, scratch, flash)]
        blocks = self._blocks(layer)
        return [
            Chunk(
                self.layout,
                pool,
                table[row],
                blocks[row],
                tuple(x[first:end] for x in states),
                before,
                bool(slots[first] >= 0),
                first,
            )
            for row, first, end, before in rows
        ]

    def _blocks(self, layer: Any) -> Tensor:
        """Pages of the rings of all requests, [requests, rings]."""
        found = get_forward_context().attn_metadata
        tables = [found[name].block_table for name in self._rings(layer) if name in found]
        return torch.cat(tables, 1)[:, : self.layout.rings]

    def _reserve(self, device: torch.device) -> Tensor | None:
        """Scratch of chunks, which layers of one layout share; vLLM's first run counts it."""
        if not has_kernels(device) or refusal(self.layout) is not None:
            return None
        if self.scratch is None:
            others = (getattr(x, "impl", None) for x in self._layers.values())
            ours = [x for x in others if isinstance(x, PagesAttention) and x.own is None]
            sizes = (self.layout, self.num_kv_heads)
            alike = [x.scratch for x in ours if (x.layout, x.num_kv_heads) == sizes]
            found = [x for x in alike if x is not None]
            self.scratch = found[0] if found else self._prepared(device)
        return self.scratch

    def _prepared(self, device: torch.device) -> Tensor:
        scratch = scratch_of(self.layout, self.num_kv_heads, device)
        width = -(-self._config.model_config.max_model_len // self.layout.tokens)
        group = self.num_heads // self.num_kv_heads
        prepare(self.layout, self.num_kv_heads, group, width, scratch)
        return scratch

    def _rings(self, layer: Any) -> list[str]:
        return [f"{layer.layer_name}{RING}{n}" for n in range(self.layout.rings)]

    def _check(self, layer: Any, pool: Tensor) -> None:
        """Check that rings lie in the memory of the layer, so that a block number says all."""
        found = get_forward_context().attn_metadata
        rings = [self._layers[name] for name in self._rings(layer) if name in found]
        if not pool.is_contiguous() or any(x.kv_cache.data_ptr() != pool.data_ptr() for x in rings):
            raise RuntimeError(
                f"pages and rings of {layer.layer_name} must share memory; got other groups of "
                "caches. Serve all layers alike: without --kv-cache-dtype-skip-layers and widths."
            )
        self._seen = pool.data_ptr()
