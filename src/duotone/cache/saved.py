"""Save a cache as named tensors and a JSON-safe header; load it with checks before any use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from duotone.cache.blocks import BlockTable
from duotone.cache.checks import (
    DTYPES,
    Unchecked,
    check_classes,
    check_evicted,
    check_finite,
    check_levels,
    check_places,
    check_table,
    must,
)
from duotone.cache.declared import own_tensors, packed_parts, policy_of
from duotone.cache.index import STORES, Evicted, LedgerState, Roll
from duotone.cache.layer import LayerStore
from duotone.cache.packed import PackedTensor, has_token_axis
from duotone.cache.pair import PackedPair
from duotone.cache.ragged import valid_mask
from duotone.quant import CacheSpec, KVSpec, TensorSpec
from duotone.quant.factors import NORM

PARTS = ("key", "value")
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class SavedLayer:
    """Tensors of one layer: a `LayerStore`'s own by name, and its packed stores, canonical."""

    own: Tensors
    pairs: dict[str, PackedPair]


@dataclass(frozen=True)
class Saved:
    """Content of a cache. states: of one ledger for all layers, or of one per layer."""

    states: list[LedgerState]
    layers: list[SavedLayer]
    dtype: torch.dtype


@dataclass(frozen=True)
class Shape:
    """Sizes that a model gives a cache: (kv heads, channels of K and of V of a head) of layers."""

    heads: tuple[tuple[int, int, int], ...]

    @property
    def layers(self) -> int:
        """Count of the layers."""
        return len(self.heads)


def collect(stores: Sequence[LayerStore], states: Sequence[LedgerState]) -> tuple[dict, Tensors]:
    """(header, tensors) of a cache. Block tables that layers share are written once.

    states: of the distinct ledgers.
    """
    tensors: Tensors = {}
    for i, state in enumerate(states):
        tensors |= _ledger_tensors(state, f"ledgers.{i}.")
    packed: dict[str, Any] = {}
    tables: list[BlockTable] = []
    for i, store in enumerate(stores):
        tensors |= {f"layers.{i}.{name}": tensor for name, tensor in store.own_tensors().items()}
        for name in STORES:
            pair = getattr(store, name)
            if pair is not None:
                _collect_pair(pair.canonical(), f"layers.{i}.{name}", tensors, packed, tables)
    tensors |= {f"blocks.{i}": table.offsets for i, table in enumerate(tables)}
    header = {
        "dtype": name_of(stores[0].dtype),
        "seen": states[0].seen,
        "evicted_end": [state.evicted.end for state in states],
        "whole": [state.whole for state in states],
        "packed": packed,
    }
    return header, _with_own_memory(tensors)


def name_of(dtype: torch.dtype) -> str:
    """Name of a type, e.g. "float16"."""
    return str(dtype).removeprefix("torch.")


def _ledger_tensors(state: LedgerState, prefix: str) -> Tensors:
    tensors = {"streamed": state.streamed}
    for name in (*STORES, "dense"):
        roll = getattr(state, name)
        tensors |= {f"{name}.positions": roll.positions, f"{name}.lengths": roll.lengths}
    tensors |= {"evicted.tokens": state.evicted.tokens, "evicted.visual": state.evicted.visual}
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _collect_pair(
    pair: PackedPair,
    store: str,
    tensors: Tensors,
    packed: dict[str, Any],
    tables: list[BlockTable],
) -> None:
    """Add the tensors of one layer's store; block tables that layers share are kept once."""
    for part in PARTS:
        tensor: PackedTensor = getattr(pair, part)
        if not any(tensor.blocks is table for table in tables):
            tables.append(tensor.blocks)
        number = next(i for i, table in enumerate(tables) if table is tensor.blocks)
        packed[f"{store}.{part}"] = {"dtype": name_of(tensor.dtype), "blocks": number}
        for name in tensor.tensor_names():
            tensors[f"{store}.{part}.{name}"] = getattr(tensor, name)


def _with_own_memory(tensors: Tensors) -> Tensors:
    """Make tensors contiguous, without shared storage, as safetensors requires."""
    seen: set[int] = set()
    found = {}
    for name, tensor in tensors.items():
        tensor = tensor.contiguous()
        place = tensor.untyped_storage().data_ptr()
        found[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return found


def parse(
    header: Mapping[str, Any], tensors: Mapping[str, Tensor], spec: CacheSpec, shape: Shape
) -> Saved:
    """Inverse of `collect`, with checks of shapes, types, positions and numbers against `spec`.

    Errors: ValueError naming the first fault. KeyError or TypeError for a header that lacks fields
    or has other types in them.
    """
    return _Parsing(header, Unchecked(tensors), spec, shape).all()


class _Parsing:
    """One pass over a file's tensors; each is taken once."""

    def __init__(
        self, header: Mapping[str, Any], given: Unchecked, spec: CacheSpec, shape: Shape
    ) -> None:
        self.header, self.given, self.spec, self.shape = header, given, spec, shape
        self.dtype = DTYPES[header["dtype"]]
        self.batch = given.batch("ledgers.0.dense.lengths")
        self.tables: dict[int, BlockTable] = {}

    def all(self) -> Saved:
        ends = list(zip(self.header["evicted_end"], self.header["whole"], strict=True))
        count = 1 if self.spec.evict is None else self.shape.layers
        must(len(ends) == count, "a cache has a ledger, or one per layer that evicts", len(ends))
        states = [self._state(f"ledgers.{i}.", *both) for i, both in enumerate(ends)]
        of_layer = states if len(states) == self.shape.layers else states * self.shape.layers
        layers = [self._layer(i, state) for i, state in enumerate(of_layer)]
        self.given.finish(len(self.header["packed"]) == 2 * sum(len(la.pairs) for la in layers))
        return Saved(states, layers, self.dtype)

    def _state(self, prefix: str, end: int, whole: int) -> LedgerState:
        given, batch = self.given, self.batch
        rolls = {}
        for name in (*STORES, "dense"):
            lengths = given.take(f"{prefix}{name}.lengths", torch.long, (batch,))
            positions = given.take(f"{prefix}{name}.positions", torch.int32, (batch, None))
            rolls[name] = Roll(positions, lengths)
        streamed = given.take(
            f"{prefix}streamed", torch.bool, (batch, rolls["dense"].positions.shape[1])
        )
        gone = [
            given.take(f"{prefix}evicted.{name}", torch.long, (batch,))
            for name in ("tokens", "visual")
        ]
        state = LedgerState(
            **rolls,
            streamed=streamed,
            evicted=Evicted(*gone, end),
            seen=self.header["seen"],
            wholes=((0, whole),) if whole else (),
        )
        check_evicted(state, self.spec)
        check_places(state, prefix)
        return state

    def _layer(self, index: int, state: LedgerState) -> SavedLayer:
        spec = self.spec.at_layer(index)
        pairs = {
            name: pair
            for name in STORES
            if (pair := self._pair(index, name, spec, getattr(state, name))) is not None
        }
        return SavedLayer(self._own(index, spec, state), pairs)

    def _own(self, index: int, spec: CacheSpec, state: LedgerState) -> Tensors:
        kv_heads, *head_dims = self.shape.heads[index]
        width = state.dense.positions.shape[1]
        wanted = own_tensors(spec, self.dtype, (self.batch, kv_heads), head_dims, width)
        mask = valid_mask(state.dense.lengths, width)[:, None, :, None]
        found = {}
        for name, declared in wanted.items():
            full = f"layers.{index}.{name}"
            if declared.needed or full in self.given:
                found[name] = self.given.take(full, declared.dtype, declared.shape)
                check_finite(full, found[name], mask if declared.valid == "tokens" else None)
        if "key_norm" in wanted:
            norm, full = found.get("key_norm"), f"layers.{index}.key_norm"
            packs = bool(state.stream.lengths.any())
            must(norm is not None or not packs, "packed keys need their norm", f"no {full}")
            ok = norm is None or bool((norm > 0).all())
            must(ok, "norms of keys must be positive", full)
        self._check_lag(index, found, spec, state)
        check_levels(f"layers.{index}", found, spec, state)
        return found

    def _check_lag(self, index: int, found: Tensors, spec: CacheSpec, state: LedgerState) -> None:
        names = {"lag_values", "lag_lengths"} & found.keys()
        must(len(names) != 1, "exact V needs its lengths", f"{names} of layers.{index}")
        most = spec.text.value.lag if isinstance(spec.text, KVSpec) else 0
        packs = bool(most and state.stream.lengths.any())
        must(
            bool(names) or not packs, "packed V needs its exact V", f"no layers.{index}.lag_values"
        )
        if names:
            width, lengths = found["lag_values"].shape[2], found["lag_lengths"]
            must(width <= most, f"exact V is of {most} tokens at most", width)
            ok = bool(((lengths >= 0) & (lengths <= width)).all())
            ok = ok and bool((lengths <= state.stream.lengths).all())
            must(ok, "exact V must be of packed tokens", f"layers.{index}.lag_lengths")

    def _pair(self, index: int, name: str, spec: CacheSpec, roll: Roll) -> PackedPair | None:
        policy, store = policy_of(name, spec), f"layers.{index}.{name}"
        if f"{store}.key" not in self.header["packed"]:
            must(not roll.lengths.any(), "a store that has tokens must be there", f"no {store}")
            return None
        must(policy is not None, "a store must be one of the spec's", store)
        width = roll.positions.shape[1]
        must(width == int(roll.lengths.max()), "a store is as wide as it is long", store)
        parts = {}
        kv_heads, *head_dims = self.shape.heads[index]
        for part, head_dim in zip(PARTS, head_dims, strict=True):
            source = self.spec.source(part, index, self.shape.layers)
            tensor = getattr(policy, part)
            size, has_codes = (kv_heads, head_dim), source == index
            parts[part] = self._part(f"{store}.{part}", tensor, roll, size, has_codes=has_codes)
        return PackedPair(**parts)

    def _part(
        self, prefix: str, spec: TensorSpec, roll: Roll, size: tuple[int, int], has_codes: bool
    ) -> PackedTensor:
        entry, (kv_heads, head_dim) = self.header["packed"][prefix], size
        blocks = self._table(entry["blocks"])
        same = torch.equal(blocks.lengths, roll.lengths)
        must(same, "blocks must end where their tokens do", prefix)
        most = spec.row_tokens
        ok = most is None or blocks.longest <= most
        must(ok, f"blocks of {prefix} hold {most} tokens at most", blocks.longest)
        parts = {}
        for name, (dtype, sizes) in packed_parts(spec, head_dim).items():
            rows = roll.positions.shape[1] if has_token_axis(spec, name) else blocks.blocks
            heads = 1 if name == "factor" and spec.factors == NORM else kv_heads
            if name != "codes" or has_codes:
                shape = (self.batch, heads, rows, *sizes)
                parts[name] = self.given.take(f"{prefix}.{name}", dtype, shape)
        made = PackedTensor(
            spec=spec,
            head_dim=head_dim,
            dtype=DTYPES[entry["dtype"]],
            blocks=blocks,
            **{"codes": None, **parts},
        )
        self._check_numbers(prefix, made, roll)
        return made

    def _check_numbers(self, prefix: str, made: PackedTensor, roll: Roll) -> None:
        tokens = valid_mask(roll.lengths, roll.positions.shape[1])
        blocks = valid_mask(made.blocks.counts, made.blocks.blocks)
        valid = tokens if made.per_token else blocks
        check_finite(f"{prefix}.scale", made.scales, valid[:, None, :, None])
        if made.offset is not None:
            check_finite(f"{prefix}.zero_point", made.offset, valid[:, None, :, None])
        if made.factor is not None:
            real = (blocks if made.per_token else tokens)[:, None, :, None]
            check_finite(f"{prefix}.factor", made.factor, real)
        if made.classes is not None:
            check_classes(prefix, made, valid[:, None, :, None])

    def _table(self, number: int) -> BlockTable:
        if number not in self.tables:
            offsets = self.given.take(f"blocks.{number}", torch.long, (self.batch, None))
            check_table(f"blocks.{number}", offsets)
            self.tables[number] = BlockTable(offsets)
        return self.tables[number]
