"""Segments in records, as launches take them."""

import copy
from dataclasses import replace
from functools import lru_cache

import torch

from duotone.attention.cuda import decode
from duotone.attention.cuda.classes import decode as class_decode
from duotone.attention.cuda.classes.layout import class_layout
from duotone.attention.cuda.shared.launch import run
from duotone.attention.cuda.spans import decode as span_decode
from duotone.attention.cuda.spans.layout import span_layout
from duotone.attention.families import FAMILIES
from duotone.cache.pair import PackedPair

from cases import Case, build

LENGTHS = (9000, 300)


def built(case: Case):
    """(query, segments) of a case; a copy of what is made once."""
    made, state = _made(case)
    torch.set_rng_state(state)
    return copy.deepcopy(made)


@lru_cache(maxsize=32)
def _made(case: Case):
    """Thousands of tokens take long to quantize; with the state of random numbers after them."""
    return build(case), torch.get_rng_state()


def records_of(case: Case, layout=span_layout):
    """(query, segments), the packed one in records."""
    query, (first, *rest) = built(case)
    pair = PackedPair(first.key, first.value).laid_out(layout)
    return query, [replace(first, key=pair.key, value=pair.value, records=pair.records), *rest]


def read_by(kv):
    """Segments with their families, as a choice names them; those without tokens are left out."""
    present = [segment for segment in kv if segment.tokens]
    return [(next(f for f in FAMILIES if f.holds(segment)), segment) for segment in present]


def attend_records(query, kv, **given):
    """Attention by the CUDA kernels, which read all segments."""
    return decode.attend_records(query, read_by(kv), **given)


def span_launch(caught, tau=None, **shape):
    """(query, segment, launch) of a span of records."""
    shape = {"lengths": LENGTHS, "head_dim": 128, "kv_heads": 2, **shape}
    query, (segment, *_) = records_of(Case(**shape))
    run([span_decode.span_task(query, segment, tau)], 0.1, torch.empty_like(query))
    (one,) = caught
    return query, segment, one


def class_launch(caught, *specs, **shape):
    """(segment, launch) of a span of class records."""
    query, (segment, *_) = records_of(Case((600, 300), *specs, head_dim=128, **shape), class_layout)
    run([class_decode.class_task(query, segment)], 0.1, torch.empty_like(query))
    (one,) = caught
    return segment, one
