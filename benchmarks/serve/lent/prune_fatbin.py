"""Zero the machine code of all GPU architectures but one in a shared object, so that it compresses.

    python prune_fatbin.py in.so out.so 90 [REGEX]

With REGEX, files of kernels stay only where a name matches. Sizes and offsets stay. Entries
of other architectures keep their headers, whose number the loader skips; their code becomes zeros.
"""

import argparse
import re
import struct
from pathlib import Path

MAGIC, VERSION, HEADER = 0xBA55ED50, 1, 16
CODE = 2  # kind of an entry that is machine code


def prune(data: bytearray, keep: int, names: str = "") -> tuple[int, int]:
    """Zero entries in place; returns bytes kept and zeroed.

    Errors: ValueError for an entry of unknown layout.
    """
    at, kept, zeroed, pattern = 0, 0, 0, re.compile(names.encode())
    while (at := data.find(struct.pack("<I", MAGIC), at)) >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, at)
        if (version, header) != (VERSION, HEADER) or size > len(data):
            at += 4
            continue
        entry, end = at + header, at + header + size
        while entry + 64 <= end:
            kind, _, before, payload = struct.unpack_from("<HHIQ", data, entry)
            (architecture,) = struct.unpack_from("<I", data, entry + 28)
            begin, entry = entry + before, entry + before + payload
            if before < 24 or entry > end:
                raise ValueError(f"an entry must lie in its section; got one that ends at {entry}")
            if (kind, architecture) == (CODE, keep) and pattern.search(data, begin, entry):
                kept += payload
            else:
                data[begin:entry] = bytes(payload)
                zeroed += payload
        at = end
    return kept, zeroed


def main() -> None:
    """Write the pruned file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("keep", type=int, help="sm number")
    parser.add_argument("names", nargs="?", default="", help="of kernels that stay, a regex")
    args = parser.parse_args()
    data = bytearray(args.source.read_bytes())
    kept, zeroed = prune(data, args.keep, args.names)
    args.target.write_bytes(data)
    print(args.source.name, "kept", kept, "zeroed", zeroed)


if __name__ == "__main__":
    main()
