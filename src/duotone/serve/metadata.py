"""Metadata of a step in vLLM: which requests decode, their pages, and the pages of their rings."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.utils import split_decodes_and_prefills
from vllm.v1.kv_cache_interface import KVCacheSpec

from duotone.attention.cuda.shared.runtime import has_kernels
from duotone.serve.decode import DecodeStep, Steps
from duotone.serve.ragged import RaggedStep, Row

# Between the name of a layer and the number of its ring.
RING = ".duotone_ring_"


@dataclass
class PagesMetadata(AttentionMetadata):
    """A step of a layer. decodes: requests of one new token that kernels serve; they are the first.

    rows: of all others, (row, first token, end, tokens before). slots: of all tokens, below 0 where
    they are not kept. ragged: numbers of `rows` by (kv heads, q heads of each), which the first
    layer that has them works out.
    """

    decodes: int
    rows: list[Row]
    block_table: Tensor
    slots: Tensor
    step: DecodeStep | None
    ragged: dict[tuple[int, int], RaggedStep] = field(default_factory=dict)


@dataclass
class RingMetadata(AttentionMetadata):
    """block_table: [requests, pages], those of each request in a ring."""

    block_table: Tensor


class _Builder:
    """Builder of one cache group. main: the layer whose decode steps the group takes part in."""

    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1)
        main, *self.ring = layer_names[0].split(RING)
        self.steps = _steps(main, vllm_config, device)
        self.layer = vllm_config.compilation_config.static_forward_context[layer_names[0]]


class PagesBuilder(_Builder, AttentionMetadataBuilder[PagesMetadata]):
    """Makes the metadata of layers with pages."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> PagesMetadata:
        """Metadata of one step."""
        given, decodes = common_attn_metadata, 0
        table = given.block_table_tensor
        if self.steps is not None:
            decodes = split_decodes_and_prefills(given, decode_threshold=1)[0]
            slots = given.slot_mapping[:decodes]
            self.steps.bring("pages", (given.seq_lens[:decodes], table[:decodes], slots))
        rows = [] if decodes == given.num_reqs else _rows(given, decodes)
        step = None if self.steps is None else self.steps.decode
        return PagesMetadata(decodes, rows, table, given.slot_mapping, step)


class RingBuilder(_Builder, AttentionMetadataBuilder[RingMetadata]):
    """Makes the metadata of a ring."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RingMetadata:
        """Metadata of one step."""
        # vLLM may give more columns than a ring has pages.
        table = common_attn_metadata.block_table_tensor[:, : self.layer.pages]
        if self.steps is not None:
            self.steps.bring(int(self.ring[0]), table)
        return RingMetadata(table)


def _rows(given: CommonAttentionMetadata, first: int) -> list[Row]:
    """Rows of `PagesMetadata` from request `first` on, by numbers that the host has."""
    starts = given.query_start_loc_cpu.tolist()[first : given.num_reqs + 1]
    bound = given.seq_lens_cpu_upper_bound
    lengths = (given.seq_lens if bound is None else bound)[first : given.num_reqs].tolist()
    requests = zip(pairwise(starts), lengths, strict=True)
    return [
        (row, a, b, length - (b - a))
        for row, ((a, b), length) in enumerate(requests, first)
        if a < b
    ]


def _steps(name: str, config: VllmConfig, device: torch.device) -> Steps | None:
    """Steps of a cache group, kept by its first layer; None without kernels.

    vLLM splits a layer's rings into groups as it splits the layers, so groups of rings begin with
    rings of that layer.
    """
    if not has_kernels(device):
        return None
    first = config.compilation_config.static_forward_context[name].impl
    if first.steps is None:
        first.steps = Steps(first.layout, config.scheduler_config.max_num_seqs, device)
    return first.steps
