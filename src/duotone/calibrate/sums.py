"""Sums of a calibration: all that it knows of its samples, and what they depend on.

They do not grow with the samples. Float64 comes back from a file bit by bit: a calibration that was
interrupted ends as if it had not been.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from duotone.hf.fingerprint import fingerprint, raw_bytes
from duotone.hf.identity import weights_digest
from duotone.resume import Unfinished

from .moments import CalibrationBatch, LayerMoments
from .profiles import Profile, ProfileSums
from .settings import Settings
from .transform import Name

# Meaning of the numbers: other sums under the same name need a new one.
FORMAT = 3
# The one part of a calibration: it is written anew while sums grow.
ONLY = 1
MATRICES = ("key", "value", "query", "output")
NUMBERS = ("sm_scale", "groups", "tokens", "queries")


@dataclass
class Sums:
    """Sums of both passes, and the number of batches in each."""

    moments: dict[int, LayerMoments] = field(default_factory=dict)
    profiles: ProfileSums = field(default_factory=ProfileSums)
    moments_batches: int = 0
    profiles_batches: int = 0

    @property
    def batches(self) -> int:
        """Number of batches of both passes."""
        return self.moments_batches + self.profiles_batches

    def tensors(self) -> dict[str, Tensor]:
        """All sums, by the names they have in the file."""
        found = {
            f"moments.{layer}.{name}": getattr(sums, name)
            for layer, sums in self.moments.items()
            for name in MATRICES
        }
        found |= {_profile_name(name): p.total for name, p in self.profiles.spans.items()}
        found |= {_energy_name(layer): pair for layer, pair in self.profiles.energy.items()}
        return found

    def numbers(self) -> dict[str, Any]:
        """All that is no tensor, JSON-safe."""
        return {
            "batches": [self.moments_batches, self.profiles_batches],
            "moments": {i: {n: getattr(m, n) for n in NUMBERS} for i, m in self.moments.items()},
            "profiles": [[*name, p.tokens] for name, p in self.profiles.spans.items()],
            "energy": list(self.profiles.energy),
        }

    @classmethod
    def restored(cls, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Sums:
        """Inverse of `numbers` and `tensors`."""
        moments = {
            int(i): LayerMoments(**{n: tensors[f"moments.{i}.{n}"] for n in MATRICES}, **rest)
            for i, rest in numbers["moments"].items()
        }
        names = [(tuple(name), tokens) for *name, tokens in numbers["profiles"]]
        spans = {name: Profile(tensors[_profile_name(name)], n) for name, n in names}
        energy = {layer: tensors[_energy_name(layer)] for layer in numbers["energy"]}
        return cls(moments, ProfileSums(spans, energy), *numbers["batches"])


def _profile_name(name: Name) -> str:
    return "profiles.{}.{}.{}".format(*name)


def _energy_name(layer: int) -> str:
    return f"energy.{layer}"


def unfinished(folder: str | Path | None, identity: Mapping[str, Any]) -> Unfinished:
    """Where an unfinished calibration keeps its sums; a folder of None keeps nothing."""
    return Unfinished(folder and Path(folder), identity, "calibration", "sums", "batches")


def identity(model: Any, batches: Sequence[CalibrationBatch], settings: Settings) -> dict[str, Any]:
    """All that sums depend on, JSON-safe. Devices may change; widths are found after the sums."""
    return {
        "format": FORMAT,
        "model": fingerprint(model),
        "weights": weights_digest(model),
        "batches": _digest(batches),
        **settings.of_sums(),
    }


def _digest(batches: Sequence[CalibrationBatch]) -> str:
    """Digest of all tensors; other samples, another order or batch size change it."""
    found = hashlib.sha256()
    for batch in batches:
        for name, tensor in sorted(batch.tensors.items()):
            found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            found.update(raw_bytes(tensor))
        found.update(f"answer {batch.answer_tokens}".encode())
    return found.hexdigest()[:16]
