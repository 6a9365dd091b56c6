"""Bytes of caches, summed over batches and answers."""

from collections.abc import Sequence
from typing import Any


def cache_memory(cache: Any) -> dict[str, float]:
    """Bytes of a cache as a dictionary; a DynamicCache's padding is counted, as it is stored."""
    if hasattr(cache, "memory"):
        return cache.memory().to_dict()
    from duotone.hf.cache.own_layers import own_layers, state_tensors

    own = own_layers(cache)
    others = [layer for layer in cache.layers if layer not in own]
    tensors = [t for layer in others for t in (layer.keys, layer.values) if t is not None]
    states = [tensor for layer in own for tensor in state_tensors(layer).values()]
    state_bytes = sum(tensor.nbytes for tensor in states)
    total_bytes = sum(tensor.nbytes for tensor in tensors) + state_bytes
    bits = 8 * (tensors or states)[0].element_size()
    counted = {"total_bytes": total_bytes, "state_bytes": state_bytes}
    return {**counted, "bits_per_element": float(bits), "nominal_bits": bits}


def _bits(reports: Sequence[dict[str, float]], bytes_name: str, bits_name: str) -> float:
    """Bits per element over several caches: 8 * bytes / elements, elements = 8 * bytes / bits.

    States of layers without K and V are no bytes of elements.
    """
    states = [r.get("state_bytes", 0) if bytes_name == "total_bytes" else 0 for r in reports]
    stored = [8 * (r[bytes_name] - held) for r, held in zip(reports, states, strict=True)]
    pairs = zip(stored, reports, strict=True)
    elements = sum(bits / r[bits_name] for bits, r in pairs if r[bits_name])
    return sum(stored) / elements if elements else 0.0


def total_memory(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """Bytes summed over the caches of all batches, bits per element of the sums."""
    total = {name: sum(r[name] for r in reports) for name in reports[0] if name.endswith("_bytes")}
    for bytes_name, bits_name in (
        ("total_bytes", "bits_per_element"),
        ("visual_bytes", "visual_bits_per_element"),
    ):
        if bits_name in reports[0]:
            total[bits_name] = _bits(reports, bytes_name, bits_name)
    return total | {"nominal_bits": reports[0]["nominal_bits"]}
