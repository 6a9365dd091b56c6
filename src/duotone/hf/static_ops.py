"""The operations that a compiled decode step of a static cache consists of.

The operations' state (codes, windows, lengths) is not among their arguments: a compiler that
functionalizes a graph would copy what an operation declares to change. The order of the steps is
that of the data: each layer's query depends on the layer before.
"""

from __future__ import annotations

import itertools
import weakref

import torch
from torch import Tensor

from duotone.attention.static import StaticDecoder

# Beyond every size of a model: a compiler takes equal sizes for the same one.
_KEYS = itertools.count(1 << 24)
_DECODERS: weakref.WeakValueDictionary[int, StaticDecoder] = weakref.WeakValueDictionary()


# Outside the CUDA graphs that a compiler makes: it runs at every step, so the host can count.
@torch.library.custom_op(
    "duotone::static_begin", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def static_begin(query: Tensor, decoder: int) -> Tensor:
    """`StaticDecoder.begin`; returns the first layer's query, which so comes after it."""
    _DECODERS[decoder].begin()
    return query.clone()


@static_begin.register_fake
def _(query: Tensor, decoder: int) -> Tensor:
    return torch.empty_like(query)


@torch.library.custom_op("duotone::static_decode", mutates_args=())
def static_decode(
    query: Tensor, key: Tensor, value: Tensor, decoder: int, layer: int, sm_scale: float
) -> Tensor:
    """`StaticDecoder.attend` of one layer."""
    return _DECODERS[decoder].attend(layer, query, key, value, sm_scale)


@static_decode.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, decoder: int, layer: int, sm_scale: float
) -> Tensor:
    return query.new_empty(*query.shape[:3], value.shape[3])


def handle_of(decoder: StaticDecoder, device: torch.device) -> Tensor:
    """A tensor without bytes whose first size is the decoder's number.

    A compiler takes a number that it finds in a cache for a constant, and compiles anew for the
    next cache; a size that is marked as changing it leaves open, from the first time on.
    """
    key = next(_KEYS)
    _DECODERS[key] = decoder
    handle = torch.empty(key, 0, device=device)
    torch._dynamo.maybe_mark_dynamic(handle, 0)
    return handle
