"""The tensors of a layer, by name: their shapes and types follow from its spec.

Files are written and checked by this list. A tensor that a store keeps in addition to its dense
tokens is an attribute of `LayerStore` and one entry of `own_tensors`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from duotone.cache.blocks import single_block
from duotone.cache.packing import pack_tensor
from duotone.quant import CacheSpec, KVSpec, TensorSpec
from duotone.quant.small_floats import PARAM_TYPES

# The policy of each packed store.
POLICY = {"visual": "visual", "background": "background", "stream": "text"}


class Declared(NamedTuple):
    """Shape and type that a tensor must have.

    shape: None: of any size. valid: "tokens": a row per dense token on axis 2; rows after a
    sequence's length hold anything. "all": every number is valid. needed: False where the tensor
    may be missing.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype
    valid: str = "tokens"
    needed: bool = True


def own_tensors(
    spec: CacheSpec,
    dtype: torch.dtype,
    heads: tuple[int, int],
    head_dims: Sequence[int],
    dense_tokens: int,
) -> dict[str, Declared]:
    """{attribute of `LayerStore`: declaration} of a layer's tensors outside packed stores.

    spec: policies of the layer. dtype: type of its states. heads: (batch, kv_heads). head_dims:
    channels of K and of V. dense_tokens: width of the dense store.
    """
    found = {
        name: Declared((*heads, dense_tokens, head_dim), dtype)
        for name, head_dim in zip(("key", "value"), head_dims, strict=True)
    }
    if isinstance(spec.text, KVSpec) and spec.text.value.lag:
        exact = (*heads, None, head_dims[1])
        found["lag_values"] = Declared(exact, dtype, "all", needed=False)
        found["lag_lengths"] = Declared(heads[:1], torch.long, "all", needed=False)
    if spec.key_norm:
        norm = PARAM_TYPES[spec.text.key.param_dtype]
        found["key_norm"] = Declared((*heads, head_dims[0]), norm, "all", needed=False)
    return found


def policy_of(store: str, spec: CacheSpec) -> KVSpec | None:
    """Policy of one of `STORES`; None: a layer of this spec has no such store."""
    policy = getattr(spec, POLICY[store])
    return policy if isinstance(policy, KVSpec) else None


@lru_cache(maxsize=256)
def packed_parts(spec: TensorSpec, head_dim: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """{field of `PackedTensor`: (type, sizes after the axis of rows)}, from one packed token."""
    token = torch.zeros(1, 1, 1, head_dim, device="cpu")
    one = single_block(torch.ones(1, dtype=torch.long, device="cpu"))
    packed = pack_tensor(token, spec.replace(transform=None), one)
    parts: dict[str, Tensor] = {name: getattr(packed, name) for name in packed.tensor_names()}
    return {name: (part.dtype, tuple(part.shape[3:])) for name, part in parts.items()}
