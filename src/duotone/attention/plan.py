"""Plan, before a cache exists, which family reads each kind of a layer's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from duotone.attention.cuda.shared import runtime
from duotone.attention.cuda.shared.geometry import shared_bytes
from duotone.attention.families import FAMILIES
from duotone.attention.family import Family, Tokens
from duotone.cache.pair import Layouts
from duotone.quant import CacheSpec, KVSpec

AVERAGED = "averaged codes of several layers are in no order of the CUDA kernels"
# Tokens that are not packed: windows, sinks and dense policies.
DENSE = "dense"
PACKED = ("visual", "background", "text")
NOTHING_PACKED = "no token of such a cache is packed"
NOTHING_READ = "the CUDA kernels take no call without packed tokens that they read"
SLIDING = "a sliding window acts through a mask, which the CUDA kernels do not take"


class Shape(NamedTuple):
    """Heads of a layer, and the type of its states."""

    head_dim: int
    q_heads: int
    kv_heads: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Plan:
    """Families that read the tokens of one layer.

    Keys: "visual", "background" and "text", if these are packed, and "dense". readers: the first
    family that reads these tokens. reasons: why the CUDA kernels do not; None where they do.
    """

    readers: dict[str, Family]
    reasons: dict[str, str | None]

    @property
    def layouts(self) -> Layouts:
        """Orders of codes that the readers want."""
        wanted = (self.readers.get(kind) for kind in PACKED)
        return Layouts(*(None if family is None else family.layout for family in wanted))


def resolve(
    spec: CacheSpec,
    shape: Shape,
    device: torch.device | None = None,
    impl: str = "auto",
    *,
    sliding: bool = False,
    apart: frozenset[str] = frozenset(),
    averaged: bool = False,
) -> Plan:
    """Plan one layer. Spans of less than 96 tokens are not foreseen.

    spec: of the layer. device: None: an H200 that has cuda-core. impl: as `decode_attention` takes
    it. sliding: the layer has a sliding window. apart: names, "key" or "value", of codes that
    another layer keeps or reads. averaged: several layers average their codes.
    """
    kinds = _tokens(spec, shape, device or torch.device("cpu"), apart)
    common = None if device is None else runtime.refusal(device, impl)
    common = common or (SLIDING if sliding else None)
    reasons = {kind: common or _by_cuda(kind, at).refusal(at) for kind, at in kinds.items()}
    packed = [reasons[kind] for kind in kinds if kind != DENSE]
    if reasons[DENSE] is None and all(packed):
        reasons[DENSE] = NOTHING_READ if packed else NOTHING_PACKED
    if averaged:
        reasons = {kind: reason or AVERAGED for kind, reason in reasons.items()}
    readers = {
        kind: _by_cuda(kind, at) if reasons[kind] is None else _by_others(at, impl)
        for kind, at in kinds.items()
    }
    return Plan(readers, reasons)


def _tokens(
    spec: CacheSpec, shape: Shape, device: torch.device, apart: frozenset[str]
) -> dict[str, Tokens]:
    policies = {kind: getattr(spec, kind) for kind in PACKED}
    packed = {kind: kv for kind, kv in policies.items() if isinstance(kv, KVSpec)}
    visual = 0 if spec.tau is None else sum(kind != "text" for kind in packed)
    group = shape.q_heads // shape.kv_heads
    common = ((shape.head_dim,) * 2, group, shape.dtype, shared_bytes(device))
    found = {
        kind: Tokens(kv.key, kv.value, *common, 0 if kind == "text" else visual, apart)
        for kind, kv in packed.items()
    }
    return {**found, DENSE: Tokens(shape.dtype, shape.dtype, *common)}


def _by_cuda(kind: str, tokens: Tokens) -> Family:
    """Family of CUDA kernels whose rule tokens of a kind must keep."""
    return next(f for f in FAMILIES if kind in f.kinds and f.takes(tokens))


def _by_others(tokens: Tokens, impl: str) -> Family:
    """First family that reads tokens in canonical order; the last one, if none does."""
    skipped = ("cuda", "triton") if impl == "reference" else ("cuda",)
    others = [family for family in FAMILIES if family.impl not in skipped]
    return next((f for f in others if f.refusal(tokens) is None), others[-1])


def resolve_layers(
    spec: CacheSpec,
    sliding: Sequence[bool],
    shape: Shape | Sequence[Shape],
    device: torch.device | None = None,
    impl: str = "auto",
) -> list[Plan]:
    """Plan all layers.

    sliding: True at layers with a sliding window, one entry per layer. shape: of all layers, or of
    each.
    """
    shapes = [shape] * len(sliding) if isinstance(shape, Shape) else shape
    plans = []
    for layer, slides in enumerate(sliding):
        runs = _runs(spec, layer, len(sliding))
        apart = frozenset(which for which, count in runs.items() if count > 1)
        averaged = bool(apart) and spec.share.weights is not None
        more = {"sliding": slides, "apart": apart, "averaged": averaged}
        plans.append(resolve(spec.at_layer(layer), shapes[layer], device, impl, **more))
    return plans


def alike(plans: Sequence[Plan]) -> list[tuple[list[int], Plan]]:
    """Gather layers that have the same reasons, and the plan of the first of them."""
    groups: list[tuple[list[int], Plan]] = []
    for layer, plan in enumerate(plans):
        same = (layers for layers, known in groups if _rules(known) == _rules(plan))
        if (layers := next(same, None)) is None:
            groups.append(([layer], plan))
        else:
            layers.append(layer)
    return groups


def _rules(plan: Plan) -> dict[str, str | None]:
    """Rules, the text before a semicolon; the rest may differ by layer, such as a basis."""
    return {kind: reason and reason.partition("; ")[0] for kind, reason in plan.reasons.items()}


def _runs(spec: CacheSpec, layer: int, layers: int) -> dict[str, int]:
    """Number of layers that share the codes of K and of V that a layer reads."""
    if spec.share is None:
        return {}
    counts = {}
    for which in ("key", "value"):
        sources = [spec.source(which, i, layers) for i in range(layers)]
        counts[which] = sources.count(sources[layer])
    return counts
