"""Layers that are unlike the others: own widths by `--additional-config`, and skipped ones.

A skipped layer (`--kv-cache-dtype-skip-layers`) is asked of duotone's backend, too, since
`--attention-backend` holds for all layers. `OwnAttention` gives it back to vLLM.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import lcm
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import AttentionSpec, KVQuantMode

from duotone.serve.held import Layers, Paged, said
from duotone.serve.pages import PageLayout
from duotone.serve.plugin import DTYPES

logger = init_logger("vllm.duotone")


def widths_of(config: VllmConfig) -> dict[int, int]:
    """Bits of layers that have a width of their own, by `additional_config["duotone"]["widths"]`.

    Errors: ValueError for other fields, layers that are not there, widths that are not served, and
    next to skipped layers or layers that keep states.
    """
    given = dict(config.additional_config or {}).get("duotone", {})
    if not isinstance(given, dict) or given.keys() - {"widths"}:
        raise ValueError(
            'duotone\'s part of --additional-config is {"widths": {"0": 4}} or like it; got '
            f"{given!r}. Name widths alone."
        )
    widths = given.get("widths", {})
    if not isinstance(widths, dict):
        raise ValueError(
            f'widths are bits by numbers of layers, {{"0": 4}}; got {widths!r}. Write them so.'
        )
    layers = config.model_config.hf_text_config.num_hidden_layers
    served = set(DTYPES.values())
    wrong = {
        layer: bits
        for layer, bits in widths.items()
        if not str(layer).isdecimal()
        or int(layer) >= layers
        or type(bits) is not int
        or bits not in served
    }
    if wrong:
        raise ValueError(
            f"widths name layers 0 to {layers - 1} and have {sorted(served)} bits; got {wrong}. "
            "Correct or leave out these layers."
        )
    if widths and (config.cache_config.kv_cache_dtype_skip_layers or config.model_config.is_hybrid):
        raise ValueError(
            "widths by layer need pages of full attention alone; got skipped layers, or a model "
            "whose layers keep states. Leave out widths or --kv-cache-dtype-skip-layers."
        )
    return {int(layer): bits for layer, bits in widths.items()}


def bits_of(config: VllmConfig, name: str) -> int:
    """Bits of the layer of this name. Errors: as `widths_of`."""
    bits = DTYPES[config.cache_config.cache_dtype]
    widths = widths_of(config)
    return widths.get(extract_layer_index(name), bits) if widths else bits


def stretch_of(token_bytes: int, all_bytes: set[int]) -> int:
    """Times a layer's block is longer than vLLM's, so that blocks of all layers have equal bytes.

    token_bytes: of a token in the layer, all heads. all_bytes: of every layer with pages.
    """
    return lcm(*all_bytes) // token_bytes


def say_held(config: VllmConfig, paged: type[AttentionImpl]) -> None:
    """Log once what blocks are and hold; warn where few bits gain nothing.

    paged: class of layers with pages, which know their layout.
    """
    found = config.compilation_config.static_forward_context.values()
    attention = [x for x in found if getattr(x, "impl", None) is not None]
    ours = [x for x in attention if isinstance(x.impl, paged)]
    others = [x for x in attention if x not in ours and hasattr(x, "sliding_window")]
    states = [x.get_kv_cache_spec(config) for x in found if isinstance(x, MambaBase)]
    first, kinds = ours[0], Counter((x.impl.layout, x.attn_backend.stretch) for x in ours)
    widths = []
    for (layout, stretch), layers in kinds.items():
        block = config.cache_config.block_size * stretch
        widths.append(Paged(layers, block, -(-layout.rings // (block // layout.tokens))))
    layout = first.impl.layout
    held = Layers(
        paged=tuple(widths),
        page_bytes=widths[0].block * first.num_kv_heads * layout.token_bytes,
        token_bytes=2 * first.num_kv_heads * layout.head_dim * layout.dtype.itemsize,
        kept=sum(x.sliding_window is None for x in others),
        windows=tuple(x.sliding_window for x in others if x.sliding_window is not None),
        states=len(states),
        state_bytes=max(
            (replace(x, page_size_padded=None).page_size_bytes for x in states), default=0
        ),
    )
    text, nothing = said(held, config.model_config.max_model_len)
    logger.info_once("%s", text)
    if nothing:
        logger.warning_once(
            "duotone: few bits hold hardly more requests of this model than 16 bit. Serve it with "
            "--kv-cache-dtype auto, or with longer requests."
        )


class OwnAttention:
    """vLLM's own attention of a skipped layer, chosen as if no backend had been asked for.

    given: positional arguments of `AttentionImpl`. more: the others, by name.
    """

    def __init__(self, given: tuple[Any, ...], more: dict[str, Any], config: VllmConfig) -> None:
        _, head_size, *_, sliding_window, dtype, _, attn_type, _ = given
        cache = config.cache_config
        asked = AttentionSelectorConfig(
            head_size=head_size,
            dtype=torch.get_default_dtype(),
            kv_cache_dtype=dtype,
            block_size=cache.block_size if cache.user_specified_block_size else None,
            has_sink=more.get("sinks") is not None,
            attn_type=attn_type,
            has_sliding_window=sliding_window is not None,
            use_kv_connector=config.kv_transfer_config is not None,
        )
        path = current_platform.get_attn_backend_cls(None, attn_selector_config=asked)
        self.backend: type[AttentionBackend] = resolve_obj_by_qualname(path)
        self.impl: AttentionImpl = self.backend.get_impl_cls()(*given, **more)

    def take(self, layer: nn.Module, layout: PageLayout, act_dtype: torch.dtype) -> None:
        """Become the layer's attention. layout: of the layers that are not skipped."""
        layer.impl = self.impl
        layer.attn_backend = type(
            self.backend.__name__, (_NextToPages, self.backend), {"pages": layout}
        )
        layer.backend = AttentionBackendEnum[self.backend.get_name()]
        self.impl.process_weights_after_loading(act_dtype)


class _NextToPages(AttentionBackend):
    """vLLM's own backend next to pages: its blocks are as large, and hold fewer tokens."""

    pages: ClassVar[PageLayout]

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[Any]:
        """Tokens of a page while vLLM sizes blocks; then the backend's own sizes."""
        if kv_cache_spec is None:
            return [cls.pages.tokens]
        return super().get_supported_kernel_block_sizes(kv_cache_spec)

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Blocks of as many bytes as a block of pages.

        vLLM asks the first layer's backend how large the pages of all layers are.
        """
        if spec.kv_quant_mode == KVQuantMode.CUSTOM:
            return replace(spec, state_content_bytes=cls.pages.token_bytes)
        spec = super().customize_spec(spec)
        if spec.block_size == 1 or spec.page_size_padded is not None:
            return spec
        page = spec.block_size * spec.num_kv_heads * cls.pages.token_bytes
        own = spec.real_page_size_bytes // spec.block_size
        tokens = cls.pages.tokens
        fit = [x for x in range(tokens, page // own + 1, tokens) if spec.block_size % x == 0]
        if not fit:
            raise ValueError(
                f"a block of {spec.block_size} tokens in pages must hold {tokens} of a skipped "
                f"layer; got {page // own}. Leave out --block-size, or give a multiple of "
                f"{tokens * -(-own // (spec.num_kv_heads * cls.pages.token_bytes))}."
            )
        return replace(spec, block_size=fit[-1], page_size_padded=page)
