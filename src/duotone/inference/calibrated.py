"""Data of a spec's calibrated bases, in words."""

from typing import Any


def calibration_data(spec: Any) -> str:
    """Samples that the bases of a spec were made from; "" for a spec without bases."""
    from duotone.quant.bases import Reference, bases

    found = (Reference.parse(tensor.transform or "") for tensor in spec.tensors)
    files = dict.fromkeys(reference.file for reference in found if reference is not None)
    headers = [bases(file).header for file in files]
    return "; ".join(dict.fromkeys(text for text in map(_of_header, headers) if text))


def _of_header(header: dict[str, Any]) -> str:
    """Counts and tasks of a file, e.g. '64 samples of captions, 64 of documents (calibration)'."""
    parts, splits = [], []
    for part in header.get("data", ()):
        parts.append(f"{part['samples']} {'of ' if parts else 'samples of '}{part['task']}")
        splits.append(part["split"])
    where = f" ({' and '.join(dict.fromkeys(splits))} split)" if splits else ""
    return ", ".join(parts) + where
