"""Stores of random prompts in fixed buffers, as a cache's are: steps without a model."""

from typing import NamedTuple

import torch

from duotone import CacheSpec
from duotone.attention.plan import Shape, resolve_layers
from duotone.attention.static import StaticDecoder
from duotone.cache import LayerStore, Ledger, StaticPlaces, StaticStore
from duotone.cache.sharing import share_layers


class Heads(NamedTuple):
    """Sizes of a model's attention."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int


class Tokens(NamedTuple):
    """Tokens of every sequence: visual ones and text of the prompt, generated ones."""

    visual: int
    text: int
    new: int


def frozen_decoder(
    heads: Heads,
    spec: CacheSpec,
    tokens: Tokens,
    batch: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    impl: str = "auto",
) -> StaticDecoder:
    """The decoder of `batch` copies of one sequence, with room for its new tokens."""
    shape = Shape(heads.head_dim, heads.q_heads, heads.kv_heads, dtype)
    plans = resolve_layers(spec, (False,) * heads.layers, shape, torch.device(device), impl)
    stores = [LayerStore(spec.at_layer(i), plan.layouts) for i, plan in enumerate(plans)]
    share_layers(stores, spec)
    length = tokens.visual + tokens.text
    visual = (torch.arange(length, device=device) < tokens.visual)[None]
    plan = Ledger(spec, 1, torch.device(device)).plan(visual, torch.ones_like(visual))
    size = (1, heads.kv_heads, length, heads.head_dim)
    for store in stores:
        store.apply(plan, *(torch.randn(size, device=device, dtype=dtype) for _ in range(2)))
    everyone = torch.zeros(batch, dtype=torch.long, device=device)
    places, order = StaticPlaces.of(plan.after.rows(everyone), spec, tokens.new)
    frozen = []
    for store in stores:
        store.rows(everyone)
        frozen.append(StaticStore(store, places, order))
        store.key = store.value = store.stream = None
    for store, static in zip(stores, frozen, strict=True):
        static.share({w: frozen[stores.index(s)] for w, s in store.sources.items()})
    return StaticDecoder(frozen, spec.tau, impl)
