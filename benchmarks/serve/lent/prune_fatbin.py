"""Zero the machine code of all GPU architectures but one in a shared object, so that it compresses.

    python prune_fatbin.py in.so out.so 90 [REGEX]
    python prune_fatbin.py in.so out.so 80 [REGEX] --ptx   which later GPUs compile

With REGEX, files of kernels stay only where a name matches. Sizes and offsets stay. Entries
of other architectures keep their headers, whose number the loader skips; their code becomes zeros.
"""

import argparse
import re
import struct
from collections.abc import Iterator
from pathlib import Path

MAGIC, VERSION, HEADER = 0xBA55ED50, 1, 16
PTX, CODE = 1, 2  # kinds of entries


def prune(data: bytearray, keep: int, names: str = "", kind: int = CODE) -> tuple[int, int]:
    """Zero entries in place; returns bytes kept and zeroed.

    keep: architecture of what stays, which is of `kind`. names: regex of kernels, of which one is
    in a section that stays.
    Errors: ValueError for an entry of unknown layout.
    """
    at, kept, zeroed, pattern = 0, 0, 0, re.compile(names.encode())
    while (at := data.find(struct.pack("<I", MAGIC), at)) >= 0:
        _, version, header, size = struct.unpack_from("<IHHQ", data, at)
        if (version, header) != (VERSION, HEADER) or size > len(data):
            at += 4
            continue
        end = at + header + size
        # PTX is compressed; the names of its kernels are in the machine code beside it.
        is_named = pattern.search(data, at, end) is not None
        for found, architecture, begin, after in _entries(data, at + header, end):
            if is_named and (found, architecture) == (kind, keep):
                kept += after - begin
            else:
                data[begin:after] = bytes(after - begin)
                zeroed += after - begin
        at = end
    return kept, zeroed


def _entries(data: bytearray, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """Kind, architecture, begin and end of the code of each entry of a section."""
    while at + 64 <= end:
        kind, _, before, payload = struct.unpack_from("<HHIQ", data, at)
        (architecture,) = struct.unpack_from("<I", data, at + 28)
        begin, at = at + before, at + before + payload
        if before < 24 or at > end:
            raise ValueError(f"an entry must lie in its section; got one that ends at {at}")
        yield kind, architecture, begin, at


def main() -> None:
    """Write the pruned file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("keep", type=int, help="sm number")
    parser.add_argument("names", nargs="?", default="", help="of kernels that stay, a regex")
    parser.add_argument("--ptx", action="store_true", help="keep PTX, not machine code")
    args = parser.parse_args()
    data = bytearray(args.source.read_bytes())
    kept, zeroed = prune(data, args.keep, args.names, PTX if args.ptx else CODE)
    args.target.write_bytes(data)
    print(args.source.name, "kept", kept, "zeroed", zeroed)


if __name__ == "__main__":
    main()
