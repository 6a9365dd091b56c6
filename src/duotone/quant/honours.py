"""Whitelists: which choices of a spec each packer, each decoder and the cache honour.

A field of a spec is *stored* if it changes which codes and parameters are stored. It is
*decoded* if it changes how they are read back, and a *policy* if it chooses tokens, layers or
their quantizers. A decoder names the decoded fields that it honours, a packer the fields of both
roles. A new field is in no list, so every reader and every packer refuses it by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

from duotone.quant.layer_rules import RULED
from duotone.quant.spec import CacheSpec, KVSpec
from duotone.quant.spec_base import DECODED, STORED, Record, role_of
from duotone.quant.tensor_spec import BITS, PARAM_DTYPES, TensorSpec


def fields_of(kind: type[Record], *roles: str) -> frozenset[str]:
    """Names of the fields of a spec class with one of these roles."""
    return frozenset(f.name for f in fields(kind) if role_of(f) in roles)


def choices(spec: Record, *roles: str) -> dict[str, Any]:
    """Fields of these roles in which a spec differs from the default, by name."""
    found = {f.name: (f, getattr(spec, f.name)) for f in fields(spec) if role_of(f) in roles}
    return {name: value for name, (f, value) in found.items() if value != f.default}


@dataclass(frozen=True)
class Honours:
    """Choices that the code which packs, or decodes, honours.

    name: its subject in errors, a plural. honours: fields that may differ from their defaults.
    bits: widths of codes. packs: it asks for stored fields as well. params: types of scales and
    zero-points, where it honours `param_dtype`.
    """

    name: str
    honours: frozenset[str]
    bits: tuple[int, ...] = BITS
    packs: bool = False
    params: tuple[str, ...] = PARAM_DTYPES

    @classmethod
    def of(
        cls,
        name: str,
        honours: Iterable[str],
        bits: tuple[int, ...] = BITS,
        packs: bool = False,
        params: tuple[str, ...] = PARAM_DTYPES,
    ) -> Honours:
        """A whitelist of these fields. Errors: ValueError for a field that no `TensorSpec` has."""
        honours = frozenset(honours)
        if unknown := honours - fields_of(TensorSpec, DECODED, STORED):
            raise ValueError(f"a family honours fields of TensorSpec; got {sorted(unknown)}.")
        return cls(name, honours, bits, packs, params)

    def refusal(self, spec: TensorSpec) -> str | None:
        """Rule that a spec breaks, and its choice after a semicolon; None for an honoured spec."""
        return _refusal(self, spec)


@cache
def _refusal(known: Honours, spec: TensorSpec) -> str | None:
    roles = (DECODED, STORED) if known.packs else (DECODED,)
    if reason := _unknown(known.name, known.honours, choices(spec, *roles)):
        return reason
    if spec.param_dtype not in known.params:
        return (
            f"{known.name} have parameters of {known.params}; got param_dtype={spec.param_dtype!r}"
        )
    widths = {bits for bits, _ in spec.classes} if spec.classes else {spec.bits}
    if odd := sorted(widths - set(known.bits)):
        return f"{known.name} have codes of {sorted(known.bits)} bits; got {odd[0]}"
    return None


def _unknown(name: str, honours: frozenset[str], chosen: dict[str, Any]) -> str | None:
    rest = ((field, value) for field, value in chosen.items() if field not in honours)
    field, value = next(rest, (None, None))
    return None if field is None else f"{name} have no choice of {field}; got {field}={value!r}"


_READ = (
    *("bits", "along", "group", "mapping", "classes", "transform", "param_dtype"),
    *("codebook", "factors", "tile", "jensen", "lag"),
)
# Which codes and parameters PyTorch operations read, and which they store.
TORCH_READING = Honours.of("PyTorch operations that read", _READ)
TORCH_PACKING = Honours.of(
    "PyTorch operations that pack",
    (
        *(*_READ, "hybrid_at", "eta", "shrink", "levels", "gain", "energy"),
        *("clip", "ends", "grid", "ties", "heads"),
    ),
    packs=True,
)
# Fields of `CacheSpec` and of `KVSpec` that the stores and the attention to them honour.
CACHES = frozenset({"tau", "ranges", "key_norm", "share"})


def check_packed(spec: TensorSpec) -> None:
    """Raise ValueError for a choice that packing by PyTorch operations does not honour."""
    _raise_for(TORCH_PACKING.refusal(spec))


def check_read(spec: TensorSpec) -> None:
    """Raise ValueError for a choice that reading by PyTorch operations does not honour."""
    _raise_for(TORCH_READING.refusal(spec))


def check_honoured(spec: CacheSpec) -> None:
    """Raise ValueError for a choice in any part of a spec that no store or reader honours."""
    policies = [getattr(of, name) for of in (spec, *spec.layers) for name in RULED]
    for part in (spec, *(p for p in policies if isinstance(p, KVSpec))):
        _raise_for(_unknown("caches", CACHES, choices(part, DECODED, STORED)))
    for tensor in spec.tensors:
        check_read(tensor)
        check_packed(tensor)


def _raise_for(reason: str | None) -> None:
    if reason is not None:
        raise ValueError(f"{reason}. Leave the field at its default.")
