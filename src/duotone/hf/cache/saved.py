"""Packed caches on disk: one safetensors file with the spec and the ledgers beside the codes.

The header also says what K and V followed from: the model's weights, adapters, configuration and
type, numbers that its modules hold, and the content of calibrated bases. Loading compares all of
it, and checks every tensor, before a cache is made.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from duotone.cache import BlockTable, Ledger, PackedPair, Saved, Shape
from duotone.cache.checks import DTYPES, check_finite
from duotone.cache.index import STORES, LedgerState
from duotone.cache.ragged import valid_mask
from duotone.cache.saved import SavedLayer, collect, name_of, parse
from duotone.hf.cache.own_layers import check_states, taken_states
from duotone.hf.cache.scales import KeyScales, taken_scales
from duotone.hf.cache.timeline import Timeline
from duotone.hf.model.calibrated import basis_digests
from duotone.hf.model.facts import ModelFacts
from duotone.hf.model.fitting import fitting_facts
from duotone.hf.model.identity import config_differences, config_facts, is_in_memory, weights_digest
from duotone.hf.model.module_facts import number_facts
from duotone.quant import CacheSpec
from duotone.tools import tensor_file

# 6: checksum; digests of weights and bases, configuration and type of the model, and numbers that
# its modules hold.
FORMAT = "duotone-cache-6"
KEY, WHAT = "duotone", "a saved duotone cache"
# Field of the header with the layers that have scales of keys, where some have.
SCALED = "scaled_keys"
# What a caller may vouch for himself.
WAIVABLE = ("weights", "config", "dtype", "bases", "checksum")
Header = dict[str, Any]


def save_cache(timeline: Timeline, model: PreTrainedModel | None, path: str | Path) -> None:
    """Write the tokens of a cache, which `model` has filled.

    Errors: ValueError for an empty one, without a model, and for a cache that `read_cache` would
    refuse, e.g. because of numbers that are not finite.
    """
    if not timeline.ledgers:
        raise ValueError("the cache is empty; run the model with it first.")
    if model is None:
        raise ValueError("the cache's model does not exist any more; save while it does.")
    # Layers that share a ledger share one object.
    ledgers = {id(ledger): ledger for ledger in timeline.ledgers}.values()
    spec, facts = timeline.spec, timeline.facts
    header, tensors = collect(timeline.stores, [ledger.state for ledger in ledgers])
    with tensor_file.damage_named("this cache cannot be saved"):
        parse(header, tensors, spec, _shape(facts))
        check_states(timeline.own.tensors, facts, timeline.batch, timeline.length)
    tensors |= {name: x.contiguous() for name, x in timeline.own.tensors.items()}
    tensors |= timeline.scales.named()
    if timeline.scales.tensors:
        header[SCALED] = timeline.scales.layers
    header |= {"format": FORMAT, "spec": spec.to_dict(), "model": facts.signature()}
    tensor_file.write(path, tensors, header | _identity(model, spec), KEY)


def _identity(model: PreTrainedModel, spec: CacheSpec) -> Header:
    """Facts that K and V follow from, JSON-safe, by the words of `WAIVABLE`."""
    return {
        "weights": weights_digest(model) if is_in_memory(model) else None,
        "config": config_facts(model),
        "numbers": number_facts(model),
        "model_dtype": name_of(model.dtype),
        "bases": basis_digests(spec),
    }


def _shape(facts: ModelFacts) -> Shape:
    return Shape(tuple((shape.kv_heads, *shape.head_dims) for shape in facts.shapes))


def read_cache(
    path: str | Path,
    model: PreTrainedModel,
    visual_mask: Tensor | None = None,
    waive: Collection[str] = (),
) -> tuple[CacheSpec, Saved, dict[str, Tensor], KeyScales]:
    """(spec, content, states, scales) of a file; `QuantizedCache.load` says what is checked."""
    check_waive(waive)
    header, tensors = tensor_file.read(path, KEY, WHAT, "checksum" not in waive)
    with tensor_file.damage_named(f"{path} cannot be loaded"):
        found = header.get("format")
        if found != FORMAT:
            raise ValueError(
                f"it is not {WHAT} of the format {FORMAT}, got {found!r}; run the prompt again and "
                "save the cache anew"
            )
        spec = CacheSpec.from_dict(header["spec"])
        facts = fitting_facts(model, spec, visual_mask)
        signature = facts.signature()
        if signature != header["model"]:
            raise ValueError(f"it was saved for {header['model']}; this model is {signature}")
        _check_identity(header, _identity(model, spec), waive)
        states = taken_states(tensors)
        scales = taken_scales(tensors, facts, header.get(SCALED, []))
        saved = parse(header, tensors, spec, _shape(facts))
        first = saved.states[0]
        check_states(states, facts, len(first.dense.lengths), first.seen)
        if header["model_dtype"] != name_of(model.dtype):
            if states:
                raise ValueError("states of layers are not converted; load with the model's type")
            saved = _converted(saved, spec, model.dtype)
    return spec, saved, states, scales


def check_waive(waive: Collection[str]) -> None:
    """Raise ValueError for anything but words of `WAIVABLE`."""
    unknown = [waive] if isinstance(waive, str) else sorted(set(waive) - set(WAIVABLE), key=str)
    if unknown:
        raise ValueError(
            f"waive must be a tuple of some of {WAIVABLE}, e.g. waive=('weights',); got {unknown}."
        )


def _check_identity(header: Mapping[str, Any], ours: Header, waive: Collection[str]) -> None:
    """Raise ValueError naming all that differs and is not waived."""
    found = {
        "weights": _weights_difference(header.get("weights"), ours["weights"]),
        "config": _config_difference(header, ours),
        "dtype": _difference("the model's type", header["model_dtype"], ours["model_dtype"]),
        "bases": _bases_difference(header.get("bases"), ours["bases"]),
    }
    differs = {word: text for word, text in found.items() if text and word not in waive}
    if differs:
        everything = tuple(word for word in WAIVABLE if word in waive or word in differs)
        raise ValueError(
            f"its K and V are another model's: {'; '.join(differs.values())}. Run the prompt again "
            f"with this model, or load with waive={everything!r} to use them all the same"
        )


def _difference(what: str, saved: Any, ours: Any) -> str:
    if saved == ours:
        return ""
    return f"{what}: {saved} -> {ours}"


def _weights_difference(saved: str | None, ours: str | None) -> str:
    if saved is None or ours is None:
        whose = "those it was saved with" if saved is None else "this model's"
        return f"weights: nothing is known of {whose}, which were not all in memory"
    words = "weights: some parameters have other numbers or types, or adapters another state"
    return "" if saved == ours else words


def _config_difference(header: Mapping[str, Any], ours: Header) -> str:
    """Name fields of the configuration, and numbers in modules, that can be set without it."""
    found = config_differences(header["config"], ours["config"])
    found += config_differences(header["numbers"], ours["numbers"])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"configuration: {', '.join(found[:3])}{more}" if found else ""


def _bases_difference(saved: Any, ours: Mapping[str, str]) -> str:
    if saved == ours or (saved is None and not ours):
        return ""
    changed = sorted(file for file in ours if (saved or {}).get(file) != ours[file])
    return f"calibrated bases: other content in {changed}"


def _converted(saved: Saved, spec: CacheSpec, dtype: torch.dtype) -> Saved:
    """Dense tokens, and what packed ones are decoded to, in another type of the model.

    Errors: ValueError where a number would overflow, or for a type that no cache has.
    """
    if dtype not in DTYPES.values():
        raise ValueError(f"states of a cache must be of a type in {sorted(DTYPES)}; got {dtype}")
    states = saved.states if len(saved.states) > 1 else saved.states * len(saved.layers)
    layers = []
    for i, (layer, state) in enumerate(zip(saved.layers, states, strict=True)):
        own = dict(layer.own)
        mask = valid_mask(state.dense.lengths, own["key"].shape[2])[:, None, :, None]
        for name in ("key", "value"):
            own[name] = own[name].to(dtype)
            check_finite(f"layers.{i}.{name} in {dtype}", own[name], mask)
        pairs = {
            name: PackedPair(replace(p.key, dtype=dtype), replace(p.value, dtype=dtype))
            for name, p in layer.pairs.items()
        }
        layers.append(SavedLayer(own, pairs))
    return Saved(saved.states, layers, dtype)


def fill(
    timeline: Timeline, saved: Saved, states: Mapping[str, Tensor], device: torch.device
) -> None:
    """Put what a file holds into the timeline of a new cache."""
    timeline.own.fill(states, saved.states[0].seen, device)
    tables: dict[int, BlockTable] = {}
    timeline.restore([_ledger(timeline.spec, state, device) for state in saved.states])
    for store, content in zip(timeline.stores, saved.layers, strict=True):
        store.dtype = saved.dtype
        for name, tensor in content.own.items():
            setattr(store, name, tensor.to(device))
        for name, pair in content.pairs.items():
            setattr(store, name, _on_device(pair, tables, device))
            store.lay_out(name)


def _ledger(spec: CacheSpec, state: LedgerState, device: torch.device) -> Ledger:
    ledger = Ledger(spec, len(state.dense.lengths), device)
    rolls = {name: _moved(getattr(state, name), device) for name in (*STORES, "dense")}
    streamed, evicted = state.streamed.to(device), _moved(state.evicted, device)
    ledger.state = replace(state, **rolls, streamed=streamed, evicted=evicted)
    return ledger


def _moved(record: Any, device: torch.device) -> Any:
    """A dataclass whose tensors are there."""
    fields = vars(record).items()
    return replace(record, **{n: t.to(device) for n, t in fields if isinstance(t, Tensor)})


def _on_device(pair: PackedPair, tables: dict[int, BlockTable], device: torch.device) -> PackedPair:
    """Copies of these tensors on a device; tables that parts share stay one object."""
    parts = []
    for part in (pair.key, pair.value):
        known = tables.setdefault(id(part.blocks), BlockTable(part.blocks.offsets.to(device)))
        own = {name: getattr(part, name).to(device) for name in part.tensor_names()}
        parts.append(replace(part, blocks=known, **own))
    return PackedPair(*parts)
