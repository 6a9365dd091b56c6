"""vLLM's attention on duotone's pages: the one file that knows vLLM 0.33.

A layer's pages are vLLM's blocks. Tokens of a page that is not full are in ring pages: a block per
request and ring, of cache groups of their own (`CircularBufferSpec`). vLLM frees and shares blocks
as for any other cache, and prefix hits stay whole pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    KVCacheSpec,
    KVQuantMode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from duotone.attention.refused import RefusedError
from duotone.serve.pages import PageLayout, append_and_attend
from duotone.serve.plugin import DTYPES

RING = ".duotone_ring_{}"


@dataclass
class PagesMetadata(AttentionMetadata):
    """A step of a layer. rows: of each request, (first token, end, tokens before).

    stored: of each request, whether its tokens have slots.
    """

    rows: list[tuple[int, int, int]]
    stored: list[bool]
    block_table: Tensor


@dataclass
class RingMetadata(AttentionMetadata):
    """block_table: [requests, 1], the page of each request in a ring."""

    block_table: Tensor


class PagesBuilder(AttentionMetadataBuilder[PagesMetadata]):
    """Makes the metadata of layers with pages."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagesMetadata:
        """Metadata of one step."""
        given = common_attn_metadata
        starts, lengths = given.query_start_loc_cpu.tolist(), given.seq_lens.tolist()
        rows = [
            (a, b, length - (b - a))
            for a, b, length in zip(starts[:-1], starts[1:], lengths, strict=False)
        ]
        slots = given.slot_mapping.tolist()
        stored = [a < b <= len(slots) and slots[a] >= 0 for a, b, _ in rows]
        return PagesMetadata(rows, stored, given.block_table_tensor)


class RingBuilder(AttentionMetadataBuilder[RingMetadata]):
    """Makes the metadata of a ring."""

    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RingMetadata:
        """Metadata of one step."""
        return RingMetadata(common_attn_metadata.block_table_tensor)


class DuotoneBackend(AttentionBackend):
    """Few-bit pages of full attention.

    Served are decoders with head_dim of `supports_head_size`, without sinks, soft caps, windows,
    drafts, and connectors.
    """

    # Of the layers of a subclass from `backend_of`; vLLM asks this class before there are any.
    layout: ClassVar[PageLayout | None] = None
    accept_output_buffer = True
    forward_includes_kv_cache_update = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [*DTYPES]

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
        return replace(spec, state_content_bytes=(cls.layout or _layout_of_model()).token_bytes)


class RingBackend(DuotoneBackend):
    """Pages of rings."""

    @staticmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """The builder of a step's metadata."""
        return RingBuilder


class Ring(nn.Module, AttentionLayerBase):
    """One page of every request's ring in one layer, as vLLM sees it: a layer of its own."""

    def __init__(self, name: str, layer: nn.Module, layout: PageLayout) -> None:
        super().__init__()
        self.layer_name, self.num_kv_heads, self.layout = name, layer.num_kv_heads, layout
        self.kv_cache = torch.tensor([])

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend of rings."""
        return backend_of(self.layout, RingBackend)

    def get_kv_cache_spec(self, vllm_config: VllmConfig) -> KVCacheSpec:
        """Pages as large as those of the layer."""
        return CircularBufferSpec(
            block_size=vllm_config.cache_config.block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.layout.head_dim,
            dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.CUSTOM,
            state_content_bytes=self.layout.token_bytes,
            dcp_sharded=False,
        )


class PagesAttention(AttentionImpl):
    """Attention of one layer on its pages. Errors: ValueError for what is not served."""

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
        refused = {
            "ALiBi slopes": alibi_slopes is not None,
            "a sliding window (add --kv-cache-dtype-skip-layers sliding_window)": sliding_window
            is not None,
            "a soft cap of logits": bool(logits_soft_cap),
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "K and V of another layer": kv_sharing_target_layer_name is not None,
            **{f"{name}": given is not None for name, given in other.items()},
        }
        if reasons := [name for name, is_there in refused.items() if is_there]:
            raise ValueError(
                f"duotone serves full attention of decoders; got {', '.join(reasons)}. Serve this "
                "model with --kv-cache-dtype auto."
            )
        config = get_current_vllm_config()
        if config.speculative_config is not None:
            raise ValueError(
                "duotone serves without drafts; got --speculative-config. Leave it out."
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.layout = PageLayout(DTYPES[kv_cache_dtype], head_size, config.model_config.dtype)
        self._layers = config.compilation_config.static_forward_context

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Add the layer's rings: vLLM asks all layers for their caches after this."""
        name, layer = next(
            (n, x) for n, x in self._layers.items() if getattr(x, "impl", None) is self
        )
        layer.attn_backend = backend_of(self.layout)
        for ring in range(self.layout.rings):
            added = name + RING.format(ring)
            self._layers[added] = Ring(added, layer, self.layout)

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
            return output.fill_(0)
        names = [layer.layer_name + RING.format(n) for n in range(self.layout.rings)]
        context = get_forward_context()
        rings = [self._layers[name].kv_cache for name in names]
        tables = torch.cat([context.attn_metadata[name].block_table[:, :1] for name in names], 1)
        out = output.view(-1, self.num_heads, self.head_size)
        rows = zip(attn_metadata.rows, attn_metadata.stored, strict=True)
        for at, ((first, end, before), stored) in enumerate(rows):
            if first < end:
                states = tuple(x[first:end] for x in (query, key, value))
                out[first:end] = append_and_attend(
                    self.layout,
                    kv_cache,
                    rings,
                    attn_metadata.block_table[at],
                    tables[at],
                    states,
                    before,
                    self.scale,
                    stored,
                )
        return output


@cache
def backend_of(
    layout: PageLayout, base: type[DuotoneBackend] = DuotoneBackend
) -> type[DuotoneBackend]:
    """The backend of layers with this layout: vLLM asks classes, often without a configuration."""
    return type(f"{base.__name__}{layout.bits}x{layout.head_dim}", (base,), {"layout": layout})


def _layout_of_model() -> PageLayout:
    """Layout of most layers, while vLLM reads its options."""
    config = get_current_vllm_config()
    bits = DTYPES.get(config.cache_config.cache_dtype, 2)
    return PageLayout(bits, config.model_config.get_head_size(), torch.bfloat16)
