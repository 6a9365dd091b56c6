import struct

import pytest

from benchmarks.serve.lent.prune_fatbin import CODE, HEADER, MAGIC, PTX, prune


def entry(architecture: int, code: bytes, kind: int = CODE) -> bytes:
    head = bytearray(64)
    struct.pack_into("<HHIQ", head, 0, kind, 0, len(head), len(code))
    struct.pack_into("<I", head, 28, architecture)
    return bytes(head) + code


def section(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return struct.pack("<IHHQ", MAGIC, 1, HEADER, len(body)) + body


def test_code_of_one_architecture_stays():
    kept, other, text = b"kernel 128" * 8, b"x" * 80, b"ptx text" * 10
    file = bytearray(b"elf" + section(entry(90, kept), entry(80, other), entry(90, text, kind=1)))
    size = len(file)
    assert prune(file, 90) == (80, 160)
    assert len(file) == size
    assert kept in file
    assert other not in file
    assert text not in file


def test_files_of_kernels_stay_by_name():
    file = bytearray(section(entry(90, b"head 128" * 8)) + section(entry(90, b"head 256" * 8)))
    assert prune(file, 90, r"head 12\d") == (64, 64)
    assert b"head 256" not in file


def test_ptx_stays_next_to_code_of_a_name():
    ptx, other = b"packed 1" * 8, b"packed 2" * 8
    named = section(entry(80, ptx, kind=PTX), entry(80, b"head 128" * 8))
    file = bytearray(named + section(entry(80, other, kind=PTX), entry(80, b"head 256" * 8)))
    assert prune(file, 80, "head 128", PTX) == (64, 192)
    assert ptx in file
    assert other not in file
    assert b"head" not in file


def test_an_entry_past_its_section_is_refused():
    file = bytearray(section(entry(90, b"x" * 64)) + bytes(64))
    struct.pack_into("<Q", file, HEADER + 8, 65)
    with pytest.raises(ValueError, match="must lie in its section"):
        prune(file, 90)
