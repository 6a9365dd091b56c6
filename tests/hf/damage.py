"""Damage files: bits flip, ends and tensors get lost, numbers and headers change.

Each kind of damage is a function of a file's bytes and a random generator that returns other bytes.
"""

import json
import struct
from random import Random
from typing import Any

Json = dict[str, Any]
# What stands in a header in place of what belongs there.
ODD = (None, -1, 0, 3, 2**40, 1e300, float("nan"), "", "x", "float16", [], [1], {}, {"a": 1}, True)


def flip_bits(raw: bytes, rng: Random) -> bytes:
    """One to three bits, anywhere."""
    changed = bytearray(raw)
    for _ in range(rng.randint(1, 3)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(raw: bytes, rng: Random) -> bytes:
    return raw[: rng.choice([0, 1, 7, 8, 9, len(raw) - 1, rng.randrange(len(raw))])]


def append(raw: bytes, rng: Random) -> bytes:
    return raw + rng.randbytes(rng.choice([1, 8, 4096]))


def overwrite(raw: bytes, rng: Random) -> bytes:
    """A stretch of zeros or noise, as a bad block leaves it."""
    size = rng.choice([1, 16, 512])
    at = rng.randrange(len(raw))
    new = bytes(size) if rng.random() < 0.5 else rng.randbytes(size)
    return (raw[:at] + new + raw[at + size :])[: len(raw)]


def claim_length(raw: bytes, rng: Random) -> bytes:
    """A header of another length."""
    return struct.pack("<Q", rng.choice([0, 1, 2**20, 2**40, 2**63])) + raw[8:]


def drop_tensor(raw: bytes, rng: Random) -> bytes:
    index, data = _parts(raw)
    index.pop(rng.choice(_names(index)))
    return _joined(*_packed(index, data))


def swap_tensors(raw: bytes, rng: Random) -> bytes:
    """Two names change places: data, types and shapes of both are whole."""
    index, data = _parts(raw)
    first, second = rng.sample(_names(index), 2)
    index[first], index[second] = index[second], index[first]
    return _joined(index, data)


def rename_tensor(raw: bytes, rng: Random) -> bytes:
    index, data = _parts(raw)
    name = rng.choice(_names(index))
    index[rng.choice(["x", name + "x", name.replace("0", "9"), name[1:]])] = index.pop(name)
    return _joined(index, data)


def reshape_tensor(raw: bytes, rng: Random) -> bytes:
    """Give bytes another shape or type, or sizes that are not there."""
    index, data = _parts(raw)
    entry = index[rng.choice(_names(index))]
    shape = entry["shape"]
    entry["shape"] = rng.choice(
        [shape[::-1], [1, *shape], shape[1:], [*shape, 0], [2**40, 0], [2**40], [2**62, 4], [-1]]
    )
    if rng.random() < 0.3:
        entry["dtype"] = rng.choice(["F32", "F64", "I64", "U8", "BF16", "F8_E4M3", "BOOL", "C64"])
    return _joined(index, data)


def change_numbers(raw: bytes, rng: Random) -> bytes:
    """All bytes of one tensor are others: zeros, ones, NaN and infinities of some type, noise."""
    index, data = _parts(raw)
    name = rng.choice([n for n in _names(index) if _size(index[n])])
    start, end = index[name]["data_offsets"]
    pattern = rng.choice([b"\0", b"\xff", b"\x7f\x80", b"\x00\x7e", rng.randbytes(end - start)])
    new = (pattern * (end - start))[: end - start]
    return _joined(index, data[:start] + new + data[end:])


def change_header(raw: bytes, rng: Random) -> bytes:
    """One value of the metadata's JSON, at any depth, is another one or missing."""
    index, data = _parts(raw)
    key = rng.choice(list(index["__metadata__"]))
    index["__metadata__"][key] = changed_json(index["__metadata__"][key], rng)
    return _joined(index, data)


def change_metadata(raw: bytes, rng: Random) -> bytes:
    """The metadata's JSON as a whole."""
    index, data = _parts(raw)
    key = rng.choice(list(index["__metadata__"]))
    new = rng.choice(["", "{", "[]", "null", "3", "NaN", "{}", "[" * 5000, '"\\ud800"'])
    index["__metadata__"] = rng.choice([{}, {key: new}, {"other": index["__metadata__"][key]}])
    return _joined(index, data)


TENSORS = (
    flip_bits,
    truncate,
    append,
    overwrite,
    claim_length,
    drop_tensor,
    swap_tensors,
    rename_tensor,
    reshape_tensor,
    change_numbers,
    change_header,
    change_metadata,
)


def changed_text(raw: bytes, rng: Random) -> bytes:
    """A JSON file with one value changed, valid as JSON."""
    return changed_json(raw.decode(), rng).encode()


TEXTS = (flip_bits, truncate, append, overwrite, changed_text)


def changed_json(text: str, rng: Random) -> str:
    data = json.loads(text)
    places = list(_places(data))
    where, key = rng.choice(places)
    old = where[key]
    choices = [odd for odd in ODD if type(odd) is not type(old) or odd != old]
    if isinstance(old, (int, float)) and not isinstance(old, bool):
        choices += [old + 1, -old - 1, old * 2 + 1]
    if isinstance(where, dict) and rng.random() < 0.2:
        del where[key]
    else:
        where[key] = rng.choice(choices)
    return json.dumps(data)


def _places(data: Any) -> Any:
    """(container, key) of every value in JSON data."""
    items = data.items() if isinstance(data, dict) else enumerate(data)
    for key, value in list(items):
        yield data, key
        if isinstance(value, (dict, list)):
            yield from _places(value)


def _parts(raw: bytes) -> tuple[Json, bytes]:
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def _joined(index: Json, data: bytes) -> bytes:
    text = json.dumps(index).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def _packed(index: Json, data: bytes) -> tuple[Json, bytes]:
    """Without gaps between tensors."""
    parts, at = [], 0
    for name in sorted(_names(index), key=lambda n: index[n]["data_offsets"]):
        start, end = index[name]["data_offsets"]
        parts.append(data[start:end])
        index[name]["data_offsets"] = [at, at + end - start]
        at += end - start
    return index, b"".join(parts)


def _names(index: Json) -> list[str]:
    return sorted(set(index) - {"__metadata__"})


def _size(entry: Json) -> int:
    start, end = entry["data_offsets"]
    return end - start
