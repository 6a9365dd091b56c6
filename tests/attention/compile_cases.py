"""What a decode kernel is compiled with, and what its binary says."""

import ctypes
import struct

# Bytes of a block's rings without bulk copies.
RINGS = {"sm_80": 144 << 10, "sm_86": 80 << 10}


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


def shared_of(binary: bytes, function: str) -> int:
    """Bytes of shared memory that an ELF file for sm_90 gives a function, CUDA's own included."""
    (at,) = struct.unpack_from("<Q", binary, 40)
    size, count, of_names = struct.unpack_from("<HHH", binary, 58)
    sections = [struct.unpack_from("<IIQQQQ", binary, at + i * size) for i in range(count)]

    def name(section: tuple[int, ...]) -> str:
        start = sections[of_names][4] + section[0]
        return binary[start : binary.index(b"\0", start)].decode()

    return {name(section): section[5] for section in sections}[f".nv.shared.{function}"]
