"""Engines whose pages hold K and V as they are, and what transformers says to equal prompts.

Import after `engine.install`.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import duotone
from duotone.serve import attention, backend, pages, ragged, short


class ExactLayout(pages.PageLayout):
    """Pages of K and V as they are; with 4 bits, half as much again that nobody reads."""

    token_bytes = property(lambda self: (2 + self.bits // 4) * self.head_dim * self.dtype.itemsize)
    tokens = property(lambda self: 32)
    nbytes = property(lambda self: self.tokens * self.token_bytes)


def read_exact(layout: Any, pool: torch.Tensor, numbers: torch.Tensor) -> Any:
    rows = layout.records(pool)[numbers.long()].view(layout.dtype)
    both = rows.unflatten(2, (layout.tokens, -1, layout.head_dim)).transpose(1, 2).flatten(0, 1)
    return both[:, :, 0], both[:, :, 1]


def write_exact(
    layout: Any, pool: torch.Tensor, numbers: torch.Tensor, key: torch.Tensor, value: torch.Tensor
) -> None:
    parts = [key, value, key.new_full(key.shape, torch.nan)][: 2 + layout.bits // 4]
    both = torch.stack(parts, 2).unflatten(0, (-1, layout.tokens)).transpose(1, 2)
    layout.records(pool)[numbers.long()] = both.flatten(2).contiguous().view(torch.uint8)


@contextmanager
def exact_pages() -> Iterator[None]:
    """Exact pages; new ones are full of NaN."""
    backend.backend_of.cache_clear()
    monkeypatch = pytest.MonkeyPatch()
    for module in (attention, backend):
        monkeypatch.setattr(module, "PageLayout", ExactLayout)
    for module in (pages, ragged, short):
        monkeypatch.setattr(module, "read_pages", read_exact)
    for module in (pages, ragged):
        monkeypatch.setattr(module, "write_pages", write_exact)
    try:
        with poisoned_pages():
            yield
    finally:
        monkeypatch.undo()
        backend.backend_of.cache_clear()


@contextmanager
def poisoned_pages() -> Iterator[None]:
    """Pages that are given out are full of NaN, as one that another request has left could be."""
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    fresh: list[int] = []
    given, run = BlockPool.get_new_blocks, GPUModelRunner._model_forward

    def get_new_blocks(self: Any, count: int) -> Any:
        found = given(self, count)
        fresh.extend(block.block_id for block in found)
        return found

    def model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if fresh:
            for kept in self.compilation_config.static_forward_context.values():
                pool = getattr(kept, "kv_cache", None)
                if isinstance(pool, torch.Tensor) and pool.numel():
                    blocks = pool.unflatten(0, (self.kv_cache_config.num_blocks, -1))
                    blocks[torch.tensor(fresh)] = 255 if pool.dtype == torch.uint8 else torch.nan
            fresh.clear()
        return run(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(BlockPool, "get_new_blocks", get_new_blocks)
        monkeypatch.setattr(GPUModelRunner, "_model_forward", model_forward)
        yield


def prompts_of(count: int, seed: int = 0, least: int = 3, most: int = 200) -> list[list[int]]:
    draw = random.Random(seed)
    return [
        [draw.randrange(3, 320) for _ in range(draw.randrange(least, most))] for _ in range(count)
    ]


def own(model: Path, prompts: list[list[int]], new: int, spec: Any = None) -> list[list[int]]:
    """Tokens of transformers, on its own cache or on a `QuantizedCache`."""
    from transformers import AutoModelForCausalLM

    llama = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def said(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        options = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": 0}
        mask = torch.ones_like(ids)
        found = llama.generate(
            ids, attention_mask=mask, do_sample=False, eos_token_id=None, **options
        )
        return found[0, len(prompt) :].tolist()

    if spec is None:
        return [said(p) for p in prompts]
    with duotone.enable(llama, spec):
        return [said(p) for p in prompts]


def watched(llm: Any) -> dict[str, int]:
    """Counts of an engine, as they come.

    Tokens of prefix hits, preempted requests, pages that are taken from prefixes, least free pages.
    """
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    seen = {"hits": 0, "preempted": 0, "evicted": 0, "free": pool.get_num_free_blocks()}
    hits, preempt = manager.get_computed_blocks, scheduler._preempt_request
    evict, give = pool._maybe_evict_cached_block, pool.get_new_blocks

    def get_computed_blocks(*args: Any, **kwargs: Any) -> Any:
        found = hits(*args, **kwargs)
        seen["hits"] += found[1]
        return found

    def preempt_request(*args: Any, **kwargs: Any) -> Any:
        seen["preempted"] += 1
        return preempt(*args, **kwargs)

    def evict_block(*args: Any) -> bool:
        found = evict(*args)
        seen["evicted"] += found
        return found

    def get_new_blocks(count: int) -> Any:
        found = give(count)
        seen["free"] = min(seen["free"], pool.get_num_free_blocks())
        return found

    manager.get_computed_blocks, scheduler._preempt_request = get_computed_blocks, preempt_request
    pool._maybe_evict_cached_block, pool.get_new_blocks = evict_block, get_new_blocks
    return seen
