"""Questions in words after the last answer of `duotone bench generate`, as a user goes on."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from duotone.hf.model.cache_argument import CACHE
from duotone.inference.stopping import StepClock

# Tokens of each question. Models that run for the first time at a length may plan for it.
LENGTHS = (23, 37, 53)


def question_ms(model: Any, made: Any, prompt_mask: Tensor | None) -> list[float]:
    """Ms to the first token of each question's answer.

    made: the output of `generate` that holds the sequences so far and their cache. prompt_mask:
    [batch, prompt] False at padding; None: no token is. A question repeats the last token.
    """
    ids, cache, times = made.sequences, made[CACHE], []
    mask = torch.ones_like(ids)
    if prompt_mask is not None:
        mask[:, : prompt_mask.shape[1]] = prompt_mask
    for length in LENGTHS:
        ids = torch.cat([ids, ids[:, -1:].expand(-1, length)], 1)
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
        clock, begin = StepClock(ids.device), perf_counter()
        made = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=1,
            do_sample=False,
            return_dict_in_generate=True,
            stopping_criteria=[clock],
            **{CACHE: cache},
        )
        times.append(1e3 * (clock.times_s[0] - begin))
        ids, cache = made.sequences, made[CACHE]
    return times
