"""vLLM's "own" attention of the platform for tests: 16-bit pages in plain torch."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)


@dataclass
class PlainMetadata(AttentionMetadata):
    given: CommonAttentionMetadata


class PlainBuilder(AttentionMetadataBuilder[PlainMetadata]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return PlainMetadata(common_attn_metadata)


class Plain(AttentionBackend):
    accept_output_buffer = True
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name():
        return "CPU_ATTN"

    @staticmethod
    def get_impl_cls():
        return PlainAttention

    @staticmethod
    def get_builder_cls():
        return PlainBuilder

    @classmethod
    def supports_sliding_window(cls):
        return True

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec=None):
        return [MultipleOf(16)]


class PlainAttention(AttentionImpl):
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, alibi, window, *other, **more
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.window = num_kv_heads, window or 1 << 30

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output=None, *scales, **more
    ):
        if attn_metadata is None:
            return output.fill_(0)
        given, tokens = attn_metadata.given, kv_cache.shape[2]
        count = given.num_actual_tokens
        slots = given.slot_mapping[:count]
        both = torch.cat([key[:count], value[:count]], -1)
        kv_cache[slots // tokens, :, slots % tokens] = both
        edges = given.query_start_loc.tolist()[: given.num_reqs + 1]
        for row, (first, end) in enumerate(pairwise(edges)):
            length = int(given.seq_lens[row])
            positions = torch.arange(length)
            # A window frees its first blocks: only those that are seen are read.
            block = given.block_table_tensor[row].long()[positions // tokens]
            seen = torch.arange(length - (end - first), length)[:, None]
            mask = (positions <= seen) & (positions > seen - self.window)
            past = kv_cache[block, :, positions % tokens]
            past[~mask.any(0)] = 0
            keys, values = (
                x.repeat_interleave(self.num_heads // self.num_kv_heads, 1).transpose(0, 1)
                for x in past.split(self.head_size, -1)
            )
            output[first:end] = torch.nn.functional.scaled_dot_product_attention(
                query[first:end].transpose(0, 1),
                keys,
                values,
                mask,
                scale=self.scale,
            ).transpose(0, 1)
        return output
