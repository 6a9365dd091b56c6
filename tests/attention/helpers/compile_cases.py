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


def sections(binary: bytes) -> dict[str, tuple[int, int]]:
    """(first byte, bytes) of each section of an ELF file."""
    (at,) = struct.unpack_from("<Q", binary, 40)
    size, count, of_names = struct.unpack_from("<HHH", binary, 58)
    headers = [struct.unpack_from("<IIQQQQ", binary, at + i * size) for i in range(count)]

    def name(header: tuple[int, ...]) -> str:
        start = headers[of_names][4] + header[0]
        return binary[start : binary.index(b"\0", start)].decode()

    return {name(header): header[4:6] for header in headers}


def shared_of(binary: bytes, function: str) -> int:
    """Bytes of shared memory that a cubin for sm_90 gives a function, CUDA's own included."""
    return sections(binary)[f".nv.shared.{function}"][1]


def stack_of(binary: bytes) -> int:
    """Bytes that a cubin's functions keep on the stack at most: registers that did not suffice."""
    at, nbytes = sections(binary)[".nv.info"]
    end, most, frame_size, has_payload = at + nbytes, 0, 0x11, 4
    while at < end:
        form, attribute, size = struct.unpack_from("<BBH", binary, at)
        if attribute == frame_size:
            most = max(most, struct.unpack_from("<I", binary, at + 8)[0])
        at += 4 + (size if form == has_payload else 0)
    return most
