"""Macros and sources that a decode kernel is compiled with."""

import ctypes

from duotone.attention.cuda.shared import runtime
from duotone.attention.cuda.shared.work import Call

# Bytes of a block's rings; with bulk copies from sm_90 on.
RINGS = {"sm_80": 144 << 10, "sm_86": 80 << 10, "sm_90": 208 << 10}


def common(form, group, warps, arguments) -> dict[str, int]:
    return {
        "CHANNELS": form.head_dim,
        "G": group,
        "WARPS": warps,
        "PER_SM": 1,
        "STAGES": form.stages,
        "OVERLAP": 1,
        "QUERY": 1,
        "OUT": 1,
        "PAGED": 0,
        "MERGE": 1,
        "ARGUMENTS_BYTES": ctypes.sizeof(arguments),
    }


def compiled(arch, module, form, group, warps=None, own=None, source=None, **more) -> bytes:
    """The binary of a decode kernel.

    Without `warps`, of as many as its rings leave. own: what its macros depend on, if no group.
    """
    if warps is None:
        warps = module.warps_of(form, group, RINGS[arch])
        assert warps
    arguments = module.Arguments if getattr(form, "is_apart", True) else Call
    macros = common(form, group, warps, arguments)
    macros |= module.macros_of(form, group if own is None else own)
    return binary_of(source or module.SOURCE, arch, macros | more)


def binary_of(source: str, arch: str, macros: dict[str, int]) -> bytes:
    binary = runtime.compiled(source, arch, macros)
    assert binary[:4] == b"\x7fELF"
    return binary
