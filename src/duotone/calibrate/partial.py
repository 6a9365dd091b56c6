"""Sums of an unfinished calibration, in a file next to its output.

The file holds sums only, so it does not grow with the samples. Float64 comes back bit by bit: a
calibration that was interrupted ends as if it had not been.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from torch import Tensor

from duotone.hf.fingerprint import fingerprint, raw_bytes, weights_digest
from duotone.quant import tensor_file
from duotone.resume import check_identity, noted

from .moments import CalibrationBatch, LayerMoments
from .profiles import Profile, ProfileSums
from .settings import Settings
from .transform import Name

# Format of the file and meaning of its numbers: other sums under the same name need a new one.
FORMAT = 3
# Seconds between two writes, per second that the last one took: writing takes a twentieth of the
# time at most, and where sums are small hardly a batch is lost.
PAUSE = 20.0
KEY = "duotone.partial"
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
        """All sums on the CPU, by the names they have in the file."""
        found = {
            f"moments.{layer}.{name}": getattr(sums, name)
            for layer, sums in self.moments.items()
            for name in MATRICES
        }
        found |= {_profile_name(name): p.total for name, p in self.profiles.spans.items()}
        found |= {_energy_name(layer): pair for layer, pair in self.profiles.energy.items()}
        return {name: tensor.cpu().contiguous() for name, tensor in found.items()}

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


@dataclass
class Partial:
    """Sums and their file; a path of None keeps nothing."""

    path: Path | None
    identity: Mapping[str, Any]
    sums: Sums
    kept_batches: int = 0  # batches of both passes in the file
    written: float = field(default_factory=monotonic)
    pause: float = 0.0

    @classmethod
    def open(cls, path: str | Path | None, identity: Mapping[str, Any]) -> Partial:
        """Read the sums that an earlier run left at `path`, or begin with none.

        Errors: ValueError for a file that cannot be read, or that belongs to something else.
        """
        if path is None or not Path(path).exists():
            return cls(path and Path(path), identity, Sums())
        path, header = Path(path), read_header(path)
        again = "remove the file to begin again"
        check_identity("calibration", path, header["identity"], identity, again)
        with _damage_named(path):
            # Copies: the file is written anew while sums grow.
            sums = Sums.restored(*tensor_file.read(path, KEY, "the sums of a calibration"))
        return cls(path, identity, sums, sums.batches)

    def keep(self, now: bool = False) -> None:
        """Write the sums if the last time is long ago, or at once; a reader sees all or nothing."""
        began = monotonic()
        if self.path is None or not (now or began - self.written >= self.pause):
            return
        header = {"identity": dict(self.identity), **self.sums.numbers()}
        tensor_file.write(self.path, self.sums.tensors(), header, KEY)
        self.written, self.kept_batches = monotonic(), self.sums.batches
        self.pause = PAUSE * (self.written - began)

    def noted(self, total: int) -> AbstractContextManager[None]:
        """Work on `total` batches whose interruption carries a note of finished ones."""
        return noted(lambda: None if self.path is None else self._what_is_kept(total))

    def _what_is_kept(self, total: int) -> str:
        if not self.kept_batches:
            return "nothing is kept yet, the first batch was not done"
        lost = self.sums.batches - self.kept_batches
        later = f", later ones ({lost}) are lost" if lost else ""
        return (
            f"{self.kept_batches} of {total} batches are kept in {self.path}{later}; the same "
            "command goes on there"
        )


def remove_partial(path: Path) -> None:
    """Remove the file of a finished calibration, and what a write that was cut short has left."""
    for file in (path, *path.parent.glob(tensor_file.unfinished(path).name)):
        file.unlink(missing_ok=True)


def read_header(path: Path) -> dict[str, Any]:
    """Read the header alone. Errors: ValueError for a file that is no whole partial file."""
    from safetensors import SafetensorError, safe_open

    # Sizes are checked when it is opened: a file that was cut off ends here.
    with _damage_named(path, SafetensorError), safe_open(path, "pt") as opened:
        header = json.loads((opened.metadata() or {}).get(KEY, "{}"))
        if not isinstance(header, dict) or "identity" not in header:
            raise ValueError("it is no partial file")
    return header


@contextmanager
def _damage_named(path: Path, *also: type[Exception]) -> Iterator[None]:
    rule = f"a partial file must come from an interrupted calibration, got {str(path)!r}"
    try:
        with tensor_file.damage_named(rule, *also):
            yield
    except ValueError as error:
        raise ValueError(f"{error}. Remove it to begin again, or give another --out") from error
