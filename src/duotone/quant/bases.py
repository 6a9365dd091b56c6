"""Calibrated bases, into which a model's K and V are rotated before quantization.

A basis is a matrix E [head_dim, head_dim] per layer, K or V, and kv head. Coefficients c = x E are
quantized and never rotated back:

    q . k = (q E^-T) . (k E)            queries are rotated once per step
    sum p v = (sum p (v E)) E^-1        and so are outputs

Specs name a basis by reference, "klt:FILE#LAYER.key" or ".value"; FILE is a path, or "preset:NAME"
for a file that ships with duotone. In a spec's own file a relative path is of that file's folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from duotone.quant.spec_base import require
from duotone.tools import tensor_file
from duotone.tools.digest import digest
from duotone.tools.kept import cached_once, kept

# 2: a checksum.
FORMAT = 2
# E is a square root with a floor (`calibrate.transform`), far within both limits.
MAX_CONDITION, MAX_NUMBER = 1e6, 1e9
REMEDY = "Make a file with duotone calibrate."
FEW = "Were the statistics of too few tokens? Make a file with duotone calibrate."
KIND = "klt"
REFERENCE = re.compile(rf"{KIND}:(?P<file>.+)#(?P<layer>[0-9]{{1,6}})\.(?P<which>key|value)")
# Specs and bases that ship with the package.
PRESETS = Path(__file__).parent / "presets"
SHIPPED = "preset:"
Matrices = Float[Tensor, "kv_heads head_dim head_dim"]


class Reference(NamedTuple):
    """Name of one basis: file, layer, and K or V."""

    file: str
    layer: int
    which: Literal["key", "value"]

    def __str__(self) -> str:
        return f"{KIND}:{self.file}#{self.layer}.{self.which}"

    @classmethod
    def parse(cls, text: str) -> Reference | None:
        """Parse a reference; None if `text` is no reference."""
        found = REFERENCE.fullmatch(text)
        return found and cls(found["file"], int(found["layer"]), found["which"])


def with_files(data: Any, file_of: Callable[[str], str]) -> Any:
    """JSON-safe data with the files of all references in it replaced; shipped files stay."""
    if isinstance(data, dict):
        return {name: with_files(value, file_of) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [with_files(value, file_of) for value in data]
    reference = Reference.parse(data) if isinstance(data, str) else None
    if reference is None or _ships(reference.file):
        return data
    return str(reference._replace(file=file_of(reference.file)))


def beside(folder: Path) -> Callable[[str], str]:
    """`file_of` for `with_files`: relative paths are of `folder`, where a file lies there."""

    def file_of(file: str) -> str:
        found = folder / file
        return str(found) if found.is_file() else file

    return file_of


@dataclass(frozen=True)
class Bases:
    """All bases of a model.

    key, value: E of every layer. header: model and origin, JSON-safe; "fingerprint" is the
    model's.
    """

    key: Float[Tensor, "layers kv_heads head_dim head_dim"]
    value: Float[Tensor, "layers kv_heads head_dim head_dim"]
    header: dict[str, Any]

    @cached_property
    def digest(self) -> str:
        """Digest of all matrices and of the model's fingerprint."""
        return digest(self._tensors, self.header.get("fingerprint"))

    @property
    def _tensors(self) -> dict[str, Tensor]:
        return {"key": self.key, "value": self.value}

    def save(self, path: str | Path) -> None:
        """Write a safetensors file. Errors: ValueError for what `check_matrices` refuses."""
        # Safetensors wants every tensor to own its memory.
        tensors = {name: t.float().contiguous().clone() for name, t in self._tensors.items()}
        check_matrices(tensors)
        tensor_file.write(path, tensors, self.header | {"format": FORMAT}, "duotone")

    @classmethod
    def load(cls, file: str | Path, waive: Collection[str] = ()) -> Bases:
        """Read a file.

        waive: ("checksum",) reads a file that is damaged or has no checksum, as far as its matrices
        can be used; `save` then writes it anew. Errors: ValueError naming the file if
        it is no file of bases, damaged, or has matrices that `check_matrices` refuses.
        """
        try:
            header, tensors = tensor_file.read(
                file, "duotone", "a file of calibrated bases", "checksum" not in waive
            )
        except FileNotFoundError as error:
            raise ValueError(f"{file} cannot be read as calibrated bases: {error}.") from error
        if header.pop("format", None) != FORMAT and not waive:
            raise ValueError(
                f"{file} is no file of calibrated bases (format {FORMAT}); make one with "
                "duotone calibrate."
            )
        with tensor_file.damage_named(f"{file} cannot be used as calibrated bases"):
            check_matrices(tensors)
        return cls(tensors["key"], tensors["value"], header)


def check_matrices(tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless K and V have regular, finite matrices of one shape for all layers."""
    require(set(tensors) == {"key", "value"}, "bases are of key and value", sorted(tensors), REMEDY)
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    key = shapes["key"]
    ok = key == shapes["value"] and len(key) == 4 and key[2] == key[3] and min(key) > 0
    require(ok, "both must be [layers, kv_heads, head_dim, head_dim]", shapes, REMEDY)
    for name, tensor in tensors.items():
        kind = tensor.dtype
        require(kind == torch.float32, f"bases must be float32 ({name})", kind, REMEDY)
        finite = bool(torch.isfinite(tensor).all())
        require(finite, "bases must be finite", f"inf or NaN in {name}", FEW)
        top = float(tensor.abs().max())
        rule = f"the largest number must lie between {1 / MAX_NUMBER:g} and {MAX_NUMBER:g}"
        require(1 / MAX_NUMBER < top < MAX_NUMBER, rule, f"{top:g} in {name}", REMEDY)
        for layer, matrices in enumerate(tensor.double()):
            inverse, failed = torch.linalg.inv_ex(matrices)
            worst = float((_norm(matrices) * _norm(inverse)).max())
            ok = not failed.any() and worst < MAX_CONDITION
            rule = f"bases must have inverses, with condition numbers below {MAX_CONDITION:g}"
            require(ok, rule, f"{worst:.3g} in {name} of layer {layer}", FEW)


def _norm(matrices: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(matrices, 1)


_STATUS: dict[str, tuple[int, ...]] = {}


@cache
def bases(file: str) -> Bases:
    """Read the bases of a file, or of a shipped one ("preset:NAME"), once per process."""
    _STATUS[file] = _status(file)
    return Bases.load(_path(file))


def check_unchanged(file: str) -> None:
    """Raise ValueError where a file's content has changed since `bases` read it.

    Caches of this process hold tokens in the bases that were read first. A missing file is no
    error.
    """
    known, status = bases(file), _status(file)
    if status in ((), _STATUS[file]):
        return
    if Bases.load(_path(file)).digest != known.digest:
        raise ValueError(
            f"the calibrated bases {file!r} are others than this process has read before, and "
            "caches may hold tokens in those. Give the new ones another name, or start a new "
            "process."
        )
    _STATUS[file] = status


def _path(file: str) -> Path:
    return PRESETS / f"{file.removeprefix(SHIPPED)}.safetensors" if _ships(file) else Path(file)


def _ships(file: str) -> bool:
    return file.startswith(SHIPPED)


def _status(file: str) -> tuple[int, ...]:
    """Time, size and inode of a file, which change with its content; () without a file."""
    try:
        found = _path(file).stat()
    except OSError:
        return ()
    return (found.st_mtime_ns, found.st_size, found.st_ino)


class Turn(NamedTuple):
    """Matrices of a basis per kv head: for K and V, for outputs and decoded x, for queries."""

    into: Matrices
    back: Matrices
    query: Matrices


@cached_once
def turn(reference: str, dtype: torch.dtype, device: torch.device) -> Turn:
    """Make the matrices of a reference, kept per device: a captured step copies nothing.

    Errors: ValueError for a layer that the file does not have.
    """
    at = Reference.parse(reference)
    every = getattr(bases(at.file), at.which)
    if at.layer >= len(every):
        raise ValueError(f"{at.file} has bases of {len(every)} layers; got layer {at.layer}.")
    into = every[at.layer].double()
    back = torch.linalg.inv(into)
    made = (into, back, back.transpose(-1, -2))
    return kept(
        lambda: Turn(*(m.to(dtype=dtype, device=device).contiguous() for m in made)), device
    )
