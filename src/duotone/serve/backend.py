"""duotone's pages as vLLM 0.33 asks for them: sizes of blocks, builders, what is supported.

`attention` computes; `rings`, `layers`, `metadata`, `refusals` and `flash` know vLLM, too.
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
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode
from vllm.v1.kv_cache_layout import KVCacheLayout

from duotone.attention.refused import RefusedError
from duotone.serve.attention import PagesAttention
from duotone.serve.metadata import PagesBuilder, RingBuilder
from duotone.serve.pages import PageLayout
from duotone.serve.plugin import DTYPES


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

    @classmethod
    def of(cls, layout: PageLayout, stretch: int) -> type[DuotoneBackend]:
        """The backend of layers with this layout."""
        return backend_of(layout, stretch)

    @classmethod
    def of_rings(cls) -> type[DuotoneBackend]:
        """The backend of the rings of these layers."""
        return backend_of(cls.layout, cls.stretch, RingBackend)

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
