"""Bytes of caches, summed over batches and answers."""

from collections.abc import Sequence
from typing import Any


def cache_memory(cache: Any) -> dict[str, float]:
    """Bytes of a cache as a dictionary; a DynamicCache's padding is counted, as it is stored."""
    if hasattr(cache, "memory"):
        return cache.memory().to_dict()
    tensors = [t for layer in cache.layers for t in (layer.keys, layer.values) if t is not None]
    total_bytes = sum(tensor.nbytes for tensor in tensors)
    bits = 8 * tensors[0].element_size()
    return {"total_bytes": total_bytes, "bits_per_element": float(bits), "nominal_bits": bits}


def _bits(reports: Sequence[dict[str, float]], bytes_name: str, bits_name: str) -> float:
    """Bits per element over several caches: 8 * bytes / elements, elements = 8 * bytes / bits."""
    stored = [8 * report[bytes_name] for report in reports]
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
