"""Calibrated bases: what a model's K and V are turned into before they are quantized.

A basis is a matrix E [head_dim, head_dim] per layer, K or V, and kv head. Coefficients c = x E are
quantized; nothing has to come back:

    q . k = (q E^-T) . (k E)            queries are turned once per step
    sum p v = (sum p (v E)) E^-1        and so are outputs

Specs name a basis by reference, "klt:FILE#LAYER.key" or ".value"; FILE is a path, or "preset:NAME"
for a file that ships with duotone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

FORMAT = 1
KIND = "klt"
REFERENCE = re.compile(rf"{KIND}:(?P<file>.+)#(?P<layer>[0-9]{{1,6}})\.(?P<which>key|value)")
# Specs and bases that ship with the package.
PRESETS = Path(__file__).parent / "presets"
SHIPPED = "preset:"
Matrices = Float[Tensor, "kv_heads head_dim head_dim"]


class Reference(NamedTuple):
    """Which basis of which file."""

    file: str
    layer: int
    which: Literal["key", "value"]

    def __str__(self) -> str:
        return f"{KIND}:{self.file}#{self.layer}.{self.which}"

    @classmethod
    def parse(cls, text: str) -> Reference | None:
        """The parts of a reference; None if `text` is none."""
        found = REFERENCE.fullmatch(text)
        return found and cls(found["file"], int(found["layer"]), found["which"])


@dataclass(frozen=True)
class Bases:
    """All bases of a model.

    key, value: E of every layer. header: what they belong to and where they come from, JSON-safe;
    "fingerprint" is the model's.
    """

    key: Float[Tensor, "layers kv_heads head_dim head_dim"]
    value: Float[Tensor, "layers kv_heads head_dim head_dim"]
    header: dict[str, Any]

    def save(self, path: str | Path) -> None:
        """Write a safetensors file. Errors: ValueError for numbers that are not finite."""
        from safetensors.torch import save_file

        both = {"key": self.key, "value": self.value}
        # Safetensors wants every tensor to own its memory.
        tensors = {name: t.float().contiguous().clone() for name, t in both.items()}
        if not all(bool(torch.isfinite(t).all()) for t in tensors.values()):
            raise ValueError("bases must be finite; were the statistics of too few tokens?")
        metadata = {"duotone": json.dumps(self.header | {"format": FORMAT})}
        save_file(tensors, Path(path), metadata=metadata)

    @classmethod
    def load(cls, file: str) -> Bases:
        """Read a file. Errors: ValueError if it is no file of bases."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file, "pt") as opened:
                header = json.loads((opened.metadata() or {}).get("duotone", "{}"))
                known = header.pop("format", None) == FORMAT
                tensors = [opened.get_tensor(name) for name in ("key", "value")] if known else []
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} cannot be read as calibrated bases: {error}.") from error
        if not tensors:
            raise ValueError(
                f"{file} is no file of calibrated bases (format {FORMAT}); make one with "
                "duotone calibrate."
            )
        return cls(*tensors, header)


@cache
def bases(file: str) -> Bases:
    """The bases of a file, or of one that ships with duotone ("preset:NAME"), read once."""
    if file.startswith(SHIPPED):
        return Bases.load(str(PRESETS / f"{file.removeprefix(SHIPPED)}.safetensors"))
    return Bases.load(file)


class Turn(NamedTuple):
    """What a basis multiplies with, per kv head: K and V; outputs, and what is decoded; queries."""

    into: Matrices
    back: Matrices
    query: Matrices


@cache
def turn(reference: str, dtype: torch.dtype, device: torch.device) -> Turn:
    """The matrices of a reference, kept per device: a captured step copies nothing.

    Errors: ValueError for a layer that the file does not have.
    """
    at = Reference.parse(reference)
    every = getattr(bases(at.file), at.which)
    if at.layer >= len(every):
        raise ValueError(f"{at.file} has bases of {len(every)} layers; got layer {at.layer}.")
    into = every[at.layer].double()
    back = torch.linalg.inv(into)
    made = (into, back, back.transpose(-1, -2))
    return Turn(*(m.to(dtype=dtype, device=device).contiguous() for m in made))
