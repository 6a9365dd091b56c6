"""Whitelists: which choices of a `TensorSpec` each packer and each decoder honours.

A field of `TensorSpec` is *stored* if it changes which codes and parameters are stored, *decoded*
if it changes how they are read back. A decoder names the decoded fields that it honours, a packer
the fields of both roles. A new field is in no list, so every family refuses it by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from duotone.quant.tensor_spec import BITS, DECODED, ROLE, STORED, TensorSpec


def fields_of(*roles: str) -> frozenset[str]:
    """Names of the fields of `TensorSpec` with one of these roles."""
    return frozenset(f.name for f in fields(TensorSpec) if f.metadata[ROLE] in roles)


def choices(spec: TensorSpec, *roles: str) -> dict[str, Any]:
    """Fields of these roles in which a spec differs from the default, by name."""
    found = {f.name: (f, getattr(spec, f.name)) for f in fields(spec) if f.metadata[ROLE] in roles}
    return {name: value for name, (f, value) in found.items() if value != f.default}


@dataclass(frozen=True)
class Family:
    """Code that packs or decodes tensors, and the choices that it honours.

    name: its subject in errors, a plural. honours: fields that may differ from their defaults.
    bits: widths of codes. packs: it asks for stored fields as well.
    """

    name: str
    honours: frozenset[str]
    bits: tuple[int, ...] = BITS
    packs: bool = False

    @classmethod
    def of(
        cls, name: str, honours: Iterable[str], bits: tuple[int, ...] = BITS, packs: bool = False
    ) -> Family:
        """A family of these fields. Errors: ValueError for a field that no spec has."""
        honours = frozenset(honours)
        if unknown := honours - fields_of(DECODED, STORED):
            raise ValueError(f"a family honours fields of TensorSpec; got {sorted(unknown)}.")
        return cls(name, honours, bits, packs)

    def refusal(self, spec: TensorSpec) -> str | None:
        """Rule that a spec breaks, and its choice after a semicolon; None for an honoured spec."""
        return _refusal(self, spec)


@cache
def _refusal(family: Family, spec: TensorSpec) -> str | None:
    chosen = choices(spec, *((DECODED, STORED) if family.packs else (DECODED,)))
    for name, value in chosen.items():
        if name not in family.honours:
            return f"{family.name} have no choice of {name}; got {name}={value!r}"
    widths = {bits for bits, _ in spec.classes} if spec.classes else {spec.bits}
    if odd := sorted(widths - set(family.bits)):
        return f"{family.name} have codes of {sorted(family.bits)} bits; got {odd[0]}"
    return None


# What PyTorch operations pack and dequantize: all choices there are.
TORCH = Family.of(
    "PyTorch operations",
    {
        *("bits", "along", "group", "mapping", "classes", "transform", "param_dtype"),
        *("hybrid_at", "eta", "shrink", "levels", "gain", "energy"),
    },
    packs=True,
)


def check_honoured(spec: TensorSpec) -> None:
    """Raise ValueError for a choice that PyTorch operations do not honour."""
    if reason := TORCH.refusal(spec):
        raise ValueError(f"{reason}. Leave the field at its default.")
