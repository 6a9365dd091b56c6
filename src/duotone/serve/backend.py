"""vLLM's attention on duotone's pages; `layers`, `metadata` and `flash` know vLLM 0.33, too.

A layer's pages are vLLM's blocks. Tokens of a page that is not full are in ring pages: a block per
request and ring, of cache groups of their own (`CircularBufferSpec`). vLLM frees and shares blocks
as for any other cache, and prefix hits stay whole pages. A ring has as many pages as a block, so
that longer blocks need fewer rings.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionType,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    KVCacheSpec,
    KVQuantMode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from duotone.attention.cuda.shared.runtime import has_kernels
from duotone.attention.refused import RefusedError
from duotone.serve.flash import flash
from duotone.serve.layers import OwnAttention, bits_of, say_held, stretch_of, widths_of
from duotone.serve.metadata import RING, PagesBuilder, PagesMetadata, RingBuilder
from duotone.serve.pages import Chunk, PageLayout
from duotone.serve.plugin import DTYPES
from duotone.serve.prepared import prepare, scratch_of
from duotone.serve.ragged import RaggedChunks, RaggedStep, refusal


class DuotoneBackend(AttentionBackend):
    """Few-bit pages of full attention.

    Served are decoders with head_dim of `supports_head_size`, without sinks, soft caps, windows,
    drafts, and connectors.
    """

    # Of the layers of a subclass from `backend_of`; vLLM asks this class before there are any.
    layout: ClassVar[PageLayout | None] = None
    # Times a block is longer than vLLM's, so that pages of all widths take equal bytes.
    stretch: ClassVar[int] = 1
    accept_output_buffer = True
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    # "auto": of layers that are skipped, which get vLLM's own backend.
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", *DTYPES]

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's registry."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """The layer's attention."""
        return PagesAttention

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """The builder of a step's metadata."""
        return PagesBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Layouts in which a page of one head is one run of bytes."""
        return (KVCacheLayout.LBHNC,)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """True where kernels read pages of this head_dim."""
        try:
            return PageLayout(2, head_size, torch.bfloat16).tokens > 0
        except RefusedError:
            return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """True, for layers that are skipped; the others refuse windows by name."""
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        """False: a connector may end inside a page, of which the ring then knows nothing."""
        return False

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int]:
        """Tokens of a page, and nothing else: vLLM takes the largest that divides its block."""
        return [(cls.layout or _layout_of_model()).tokens]

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """A spec whose pages have our bytes."""
        if spec.state_content_bytes is not None or spec.kv_quant_mode != KVQuantMode.CUSTOM:
            return spec
        block = spec.block_size * (cls.stretch if spec.block_size > 1 else 1)
        size = (cls.layout or _layout_of_model()).token_bytes
        return replace(spec, block_size=block, state_content_bytes=size)


class RingBackend(DuotoneBackend):
    """Pages of rings."""

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """The builder of a step's metadata."""
        return RingBuilder


class Ring(nn.Module, AttentionLayerBase):
    """Pages of every request's ring in one layer, as vLLM sees them: a layer of its own."""

    def __init__(self, name: str, number: int, layer: nn.Module, layout: PageLayout) -> None:
        super().__init__()
        self.layer_name, self.number, self.layout = name, number, layout
        self.backend, self.num_kv_heads = layer.attn_backend, layer.num_kv_heads
        self.pages, self.kv_cache = 1, torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend of rings."""
        return backend_of(self.layout, self.backend.stretch, RingBackend)

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
            say_held(vllm_config, PagesAttention)
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
        if config.cache_config.cache_dtype not in DTYPES:
            raise ValueError(
                f"duotone's backend serves --kv-cache-dtype {' or '.join(DTYPES)}; got "
                f"{config.cache_config.cache_dtype}. Name one of them, or leave out "
                "--attention-backend CUSTOM."
            )
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
        if reasons := [name for name, is_there in refused.items() if is_there]:
            raise ValueError(
                f"duotone serves full attention of decoders; got {', '.join(reasons)}. Leave such "
                "layers in 16 bit by --kv-cache-dtype-skip-layers (numbers, or sliding_window), or "
                "serve this model with --kv-cache-dtype auto."
            )
        if config.speculative_config is not None:
            raise ValueError(
                "duotone serves without drafts; got --speculative-config. Leave it out."
            )
        if config.model_config.is_hybrid and config.cache_config.enable_prefix_caching:
            raise ValueError(
                "duotone serves models whose layers keep states without prefix caching, by which a "
                "tiny Qwen3.5 answered wrongly; got it on. Give --no-enable-prefix-caching."
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self._seen, self.steps, self.scratch = 0, None, None

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Give the layer its width and rings: vLLM asks layers for their caches after this."""
        name, layer = next(
            (n, x) for n, x in self._layers.items() if getattr(x, "impl", None) is self
        )
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
        layer.attn_backend = backend_of(self.layout, stretch)
        for ring in range(self.layout.rings):
            added = f"{name}{RING}{ring}"
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
            if metadata.ragged is None:
                heads = (self.num_kv_heads, self.num_heads // self.num_kv_heads)
                given = (rows, table, self._blocks(layer), slots)
                metadata.ragged = RaggedStep(self.layout, *heads, *given)
            return [RaggedChunks(metadata.ragged, pool, states, scratch, flash)]
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


@cache
def backend_of(
    layout: PageLayout, stretch: int = 1, base: type[DuotoneBackend] = DuotoneBackend
) -> type[DuotoneBackend]:
    """The backend of layers with this layout: vLLM asks classes, often without a configuration."""
    name = f"{base.__name__}{layout.bits}x{layout.head_dim}"
    return type(name, (base,), {"layout": layout, "stretch": stretch})


def _layout_of_model() -> PageLayout:
    """Layout of most layers, while vLLM reads its options."""
    config = get_current_vllm_config()
    bits = DTYPES.get(config.cache_config.cache_dtype, 2)
    return PageLayout(bits, config.model_config.get_head_size(), torch.bfloat16)
