"""Sequences that a model has read, and batches of their copies that `model.generate` goes on with.

Times do not depend on what a cache holds, so one sequence serves every batch.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

import duotone
from duotone.bench.budget import begin_peak, end_peak
from duotone.bench.generate import Inputs
from duotone.bench.generate_rows import STATIC, Row
from duotone.bench.generate_watch import Watch
from duotone.hf.graphs import rules
from duotone.hf.graphs.decode_call import reason_against_replays
from duotone.hf.model.cache_argument import CACHE
from duotone.inference.memory import cache_memory
from duotone.inference.prefilled import static_copies

# (visual tokens, text) -> (arguments of `generate` for one sequence, its visual mask or None).
Prompts = Callable[[int, int], tuple[Inputs, Tensor | None]]


@dataclass(frozen=True)
class Read:
    """One sequence that the model has read.

    ids: [1, tokens + 1], with the token that comes next. nbytes: of the cache. seconds: that the
    model took. peak_bytes: most that it held meanwhile, cache included; on a CPU the cache's alone.
    """

    cache: Any
    ids: Tensor
    mask: Tensor | None
    nbytes: int
    seconds: float
    peak_bytes: int


@dataclass(frozen=True)
class Steps:
    """Decode steps of a batch. peak_bytes: as for `Read`.

    eager: why steps were launched one by one where a graph was asked for, or None.
    """

    seconds: tuple[float, ...]
    peak_bytes: int
    eager: str | None
    notes: tuple[str, ...]


def read(model: Any, row: Row, prompt: tuple[Inputs, Tensor | None]) -> Read:
    """Let the model read one sequence into the cache of a row."""
    inputs, mask = prompt
    given = {}
    if row.spec is not None:
        given[CACHE] = duotone.QuantizedCache(model, row.spec, visual_mask=mask)
    with row.block(model, mask):
        before, begin = begin_peak(model.device), perf_counter()
        made = model.generate(
            **inputs, **given, max_new_tokens=1, do_sample=False, return_dict_in_generate=True
        )
        peak = end_peak(model.device, before)
        seconds = perf_counter() - begin
    cache = made[CACHE]
    nbytes = cache_memory(cache)["total_bytes"]
    return Read(cache, made.sequences, mask, nbytes, seconds, nbytes if peak is None else peak)


def go_on(
    model: Any, row: Row, one: Read, batch: int, tokens: int, left: int, compiled: bool = True
) -> Steps:
    """Let `generate` make `tokens` tokens of an answer with copies of a sequence.

    left: tokens until the answer ends: fixed buffers have room for all of them. compiled: False
    leaves a row that compiles as it is. Errors: torch.OutOfMemoryError, also of a capture.
    """
    before = begin_peak(model.device)
    watch, stop = Watch(model.device, lambda: False), Stop(tokens)
    with row.block(model, one.mask), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", category=duotone.SlowPathWarning)
        model.generate(
            input_ids=one.ids.repeat(batch, 1),
            attention_mask=torch.ones_like(one.ids).repeat(batch, 1),
            **{CACHE: copies(model, row, one, batch, left)},
            max_new_tokens=left,
            do_sample=False,
            stopping_criteria=[watch, stop],
            **({} if compiled or row.base != STATIC else {"disable_compile": True}),
        )
    wants_graph = row.spec is not None and row.graphs and rules.graphs_on(model.device)
    eager = stop.eager if wants_graph else None
    if eager is not None and "out of memory" in eager:
        raise torch.OutOfMemoryError(eager)
    peak = end_peak(model.device, before)
    return Steps(
        tuple(b - a for a, b in pairwise(watch.times_s)),
        batch * one.nbytes if peak is None else peak,
        eager,
        tuple(str(w.message) for w in said if issubclass(w.category, duotone.SlowPathWarning)),
    )


def copies(model: Any, row: Row, one: Read, batch: int, left: int) -> Any:
    """A cache of `batch` copies of a sequence; a static one has room for `left` tokens."""
    if row.base == STATIC:
        return static_copies(model, one.cache, batch, one.ids.shape[1] + left)
    cache = copy.deepcopy(one.cache)
    # Layers with a state of transformers' own know beams alone.
    cache.reorder_cache(torch.zeros(batch, dtype=torch.long, device=one.ids.device))
    return cache


class Stop:
    """Ends a call of `generate` after `tokens` tokens, and notes why its steps are no replays."""

    def __init__(self, tokens: int) -> None:
        self.left, self.eager = tokens, None

    def __call__(self, ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Count a token."""
        self.left -= 1
        self.eager = reason_against_replays()
        return torch.full((len(ids),), self.left <= 0, dtype=torch.bool, device=ids.device)
