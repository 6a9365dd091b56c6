"""Explain, before a cache exists, which implementation reads each kind of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from duotone.attention.cuda import reasons
from duotone.attention.cuda.dense.decode import shape_reason
from duotone.attention.cuda.shared.geometry import ring_bytes, shared_bytes
from duotone.quant import CacheSpec, KVSpec

AVERAGED = "averaged codes of several layers are in no order of the CUDA kernels"
# Name in `explain` of tokens that are not packed: windows, sinks and dense policies.
DENSE = "dense"
PACKED = ("visual", "background", "text")
# Stands for an H200, which the kernels were tuned on; no device is queried.
HOPPER = torch.device("cpu")
NOTHING_PACKED = "no token of such a cache is packed"
NOTHING_READ = "the CUDA kernels take no call without packed tokens that they read"
SLIDING = "a sliding window acts through a mask, which the CUDA kernels do not take"


def explain(
    spec: CacheSpec,
    head_dim: int,
    q_heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    *,
    device: torch.device | None = None,
    impl: str = "auto",
    sliding: bool = False,
    apart: frozenset[str] | None = None,
) -> dict[str, str | None]:
    """Reasons why the CUDA kernels do not decode kinds of tokens of one layer; None where they do.

    Keys: "visual", "background" and "text", if these are packed, and "dense". Triton or the
    reference reads the tokens that the kernels do not. Spans of less than 96 tokens are not
    foreseen.

    spec: of the layer. dtype: of the model. device: None: an H200 that has cuda-core. impl: "auto"
    or "cuda". sliding: the layer has a sliding window. apart: names, "key" or "value", of codes
    that another layer keeps or reads; None: the layer shares nothing.
    """
    common = None if device is None else reasons.device_reason(device, impl)
    common = common or reasons.query_reason(dtype) or (SLIDING if sliding else None)
    at, group = device or HOPPER, q_heads // kv_heads
    found = {
        name: common or _packed_reason(spec, name, head_dim, group, ring_bytes(at), apart)
        for name in PACKED
        if isinstance(getattr(spec, name), KVSpec)
    }
    dense = common or shape_reason((head_dim,) * 2, (dtype,) * 2, group, shared_bytes(at))
    if dense is None and all(found.values()):
        dense = NOTHING_READ if found else NOTHING_PACKED
    return {**found, DENSE: dense}


def explain_layers(
    spec: CacheSpec,
    sliding: Sequence[bool],
    head_dim: int,
    q_heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    *,
    device: torch.device | None = None,
    impl: str = "auto",
) -> list[tuple[list[int], dict[str, str | None]]]:
    """Explain a whole cache: layers that have the same answer, and the answer.

    sliding: True at layers with a sliding window, one entry per layer. spec: of all layers. Other
    arguments: as in `explain`.
    """
    groups: list[tuple[list[int], dict[str, str | None]]] = []
    for layer, slides in enumerate(sliding):
        own, apart = spec.at_layer(layer), _apart(spec, layer, len(sliding))
        more = {"device": device, "impl": impl, "sliding": slides, "apart": apart}
        found = explain(own, head_dim, q_heads, kv_heads, dtype, **more)
        if _averages(spec, layer, len(sliding)):
            found = {name: reason or AVERAGED for name, reason in found.items()}
        same = next((layers for layers, known in groups if _alike(known, found)), None)
        if same is None:
            groups.append(([layer], found))
        else:
            same.append(layer)
    return groups


def _alike(one: dict[str, str | None], other: dict[str, str | None]) -> bool:
    """Compare rules, the text before a semicolon; the rest may differ by layer, such as a basis."""
    rules = ({n: r and r.partition("; ")[0] for n, r in x.items()} for x in (one, other))
    return next(rules) == next(rules)


def _runs(spec: CacheSpec, layer: int, layers: int) -> dict[str, int]:
    """Number of layers that share the codes of K and of V that a layer reads."""
    counts = {}
    for which in ("key", "value"):
        sources = [spec.source(which, i, layers) for i in range(layers)]
        counts[which] = sources.count(sources[layer])
    return counts


def _apart(spec: CacheSpec, layer: int, layers: int) -> frozenset[str] | None:
    if spec.share is None:
        return None
    runs = _runs(spec, layer, layers)
    return frozenset(which for which, count in runs.items() if count > 1) or None


def _averages(spec: CacheSpec, layer: int, layers: int) -> bool:
    if spec.share is None or spec.share.weights is None:
        return False
    return max(_runs(spec, layer, layers).values()) > 1


def _packed_reason(
    spec: CacheSpec,
    name: str,
    head_dim: int,
    group: int,
    rings: int,
    apart: frozenset[str] | None,
) -> str | None:
    kv: KVSpec = getattr(spec, name)
    given = (kv.key, kv.value, head_dim, group, rings)
    if name == "text":
        return reasons.group_reason(*given, apart or ())
    if apart is not None:
        return reasons.SHARED_VISUAL
    return reasons.span_reason(*given) or (_tau_reason(spec, kv) if spec.tau is not None else None)


def _tau_reason(spec: CacheSpec, kv: KVSpec) -> str | None:
    if kv.key.classes or kv.value.classes:
        return reasons.CALIBRATED_GROUPS
    return reasons.CALIBRATED_TWICE if spec.background is not None else None
