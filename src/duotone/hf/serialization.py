"""Packed caches on disk: one safetensors file with the spec and the ledgers beside the codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from duotone.cache import BlockTable, Ledger, PackedPair, PackedTensor
from duotone.cache.rolls import STORES, Evicted, LedgerState, Roll
from duotone.quant import CacheSpec, TensorSpec

if TYPE_CHECKING:
    from duotone.hf.cache import QuantizedCache

# 2: a block table per layer where they differ, slots of hybrids, layers without codes.
# 3: a ledger per layer where layers evict tokens.
# 4: backgrounds of visual spans.
# 5: scales of tokens in 8-bit floats.
FORMAT = "duotone-cache-5"
PARTS = ("key", "value")


def save_cache(cache: QuantizedCache, path: str | Path) -> None:
    """Write `cache`. Block tables that layers share are written once."""
    if cache.ledger is None:
        raise ValueError("the cache is empty; run the model with it first.")
    # Layers that share a ledger share one object.
    ledgers = {id(ledger): ledger for ledger in cache.steps.ledgers}.values()
    tensors: dict[str, Tensor] = {}
    for i, ledger in enumerate(ledgers):
        tensors |= _ledger_tensors(ledger.state, f"ledgers.{i}.")
    packed: dict[str, Any] = {}
    tables: list[BlockTable] = []
    for i, layer in enumerate(cache.layers):
        tensors[f"layers.{i}.key"], tensors[f"layers.{i}.value"] = (
            layer.store.key,
            layer.store.value,
        )
        if layer.store.key_norm is not None:
            tensors[f"layers.{i}.key_norm"] = layer.store.key_norm
        for name in STORES:
            _collect_pair(getattr(layer.store, name), f"layers.{i}.{name}", tensors, packed, tables)
    # K and V may share memory; safetensors wants it separate.
    tensors |= {f"blocks.{i}": table.offsets.clone() for i, table in enumerate(tables)}
    header = {
        "format": FORMAT,
        "spec": cache.spec.to_dict(),
        "model": cache.facts.signature(),
        "dtype": _name(cache.layers[0].store.dtype),
        "seen": cache.steps.length,
        "evicted_end": [ledger.state.evicted.end for ledger in ledgers],
        "whole": [ledger.state.whole for ledger in ledgers],
        "packed": packed,
    }
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, path, metadata={"duotone": json.dumps(header)})


def _ledger_tensors(state: LedgerState, prefix: str) -> dict[str, Tensor]:
    tensors = {"streamed": state.streamed}
    for name in (*STORES, "dense"):
        roll = getattr(state, name)
        tensors |= {f"{name}.positions": roll.positions, f"{name}.lengths": roll.lengths}
    tensors |= {"evicted.tokens": state.evicted.tokens, "evicted.visual": state.evicted.visual}
    # Empty stores share their lengths; safetensors wants every tensor to own its memory.
    return {prefix + name: tensor.clone() for name, tensor in tensors.items()}


def _collect_pair(
    pair: PackedPair | None,
    store: str,
    tensors: dict[str, Tensor],
    packed: dict[str, Any],
    tables: list[BlockTable],
) -> None:
    """Add the tensors of one layer's store; block tables that layers share are kept once."""
    if pair is None:
        return
    pair = pair.canonical()
    for part in PARTS:
        tensor: PackedTensor = getattr(pair, part)
        if not any(tensor.blocks is table for table in tables):
            tables.append(tensor.blocks)
        packed[f"{store}.{part}"] = {
            "spec": tensor.spec.to_dict(),
            "head_dim": tensor.head_dim,
            "dtype": _name(tensor.dtype),
            "blocks": next(i for i, table in enumerate(tables) if table is tensor.blocks),
        }
        for name in tensor.tensor_names():
            tensors[f"{store}.{part}.{name}"] = getattr(tensor, name)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def load_cache(
    cls: type[QuantizedCache],
    path: str | Path,
    model: PreTrainedModel,
    visual_mask: Tensor | None = None,
) -> QuantizedCache:
    """Read a cache back onto the model's device."""
    header, tensors = _read(path, str(model.device))
    if header.get("format") != FORMAT:
        raise ValueError(f"{path} is not a saved duotone cache (format {FORMAT}).")
    cache = cls(model, CacheSpec.from_dict(header["spec"]), visual_mask=visual_mask)
    signature = cache.facts.signature()
    if signature != header["model"]:
        raise ValueError(f"{path} was saved for {header['model']}; this model is {signature}.")
    cache.steps.restore(
        [
            _ledger(cache.spec, header["seen"], ends, tensors, f"ledgers.{i}.")
            for i, ends in enumerate(zip(header["evicted_end"], header["whole"], strict=True))
        ]
    )
    numbers = {entry["blocks"] for entry in header["packed"].values()}
    tables = {i: BlockTable(tensors[f"blocks.{i}"]) for i in numbers}
    for i, layer in enumerate(cache.layers):
        layer.is_initialized = True
        layer.store.key, layer.store.value = (
            tensors[f"layers.{i}.key"],
            tensors[f"layers.{i}.value"],
        )
        # Files of before have no dtype; nor had they dense tokens of any other.
        layer.store.dtype = getattr(torch, header.get("dtype", _name(layer.store.key.dtype)))
        layer.store.key_norm = tensors.get(f"layers.{i}.key_norm")
        for name in STORES:
            store = f"layers.{i}.{name}"
            if f"{store}.key" in header["packed"]:
                parts = (
                    _packed(
                        header["packed"][f"{store}.{part}"], tables, tensors, f"{store}.{part}."
                    )
                    for part in PARTS
                )
                setattr(layer.store, name, PackedPair(*parts))
                layer.store.lay_out(name)
    return cache


def _read(path: str | Path, device: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The header that we wrote, {} in others' files, and all tensors."""
    try:
        with safe_open(path, "pt", device=device) as file:
            header = json.loads((file.metadata() or {}).get("duotone", "{}"))
            return header, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a saved duotone cache: {error}.") from error


def _ledger(
    spec: CacheSpec, seen: int, ends: tuple[int, int], tensors: dict[str, Tensor], prefix: str
) -> Ledger:
    own = {k.removeprefix(prefix): t for k, t in tensors.items() if k.startswith(prefix)}
    rolls = {
        name: Roll(own[f"{name}.positions"], own[f"{name}.lengths"]) for name in (*STORES, "dense")
    }
    evicted_end, whole = ends
    evicted = Evicted(own["evicted.tokens"], own["evicted.visual"], evicted_end)
    ledger = Ledger(spec, len(own["streamed"]), own["streamed"].device)
    streamed = own["streamed"]
    ledger.state = LedgerState(**rolls, streamed=streamed, evicted=evicted, seen=seen, whole=whole)
    return ledger


def _packed(
    header: dict[str, Any], tables: dict[int, BlockTable], tensors: dict[str, Tensor], prefix: str
) -> PackedTensor:
    own = {key.removeprefix(prefix): t for key, t in tensors.items() if key.startswith(prefix)}
    return PackedTensor(
        spec=TensorSpec.from_dict(header["spec"]),
        head_dim=header["head_dim"],
        dtype=getattr(torch, header["dtype"]),
        blocks=tables[header["blocks"]],
        **{"codes": None, **own},
    )
