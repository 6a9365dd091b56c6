"""Codes as lanes have them in operands: the source of `classes/codes.cuh` on a CPU."""

import ctypes

import numpy as np
import pytest
import torch

from duotone.attention.cuda.classes import decode as class_decode
from duotone.attention.cuda.classes.format import Classes
from duotone.attention.cuda.classes.layout import ClassRecords, to_class_records
from duotone.attention.cuda.shared import runtime
from duotone.attention.cuda.shared.slots import TILE
from duotone.cache import BlockTable, pack_tensor
from duotone.quant import TensorSpec

import class_lanes as lanes
from cases import CALIBRATED, SMALL_TILES, UNITS
from cuda_on_cpu import missing
from units_on_cpu import ASSEMBLY, compiled

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
LOADS = {
    f'"r"(base + i * {128 * n} +': f"memcpy(out + {n} * i, at_shared(base + i * {128 * n} + lane * "
    f"{4 * n}), {4 * n});"
    for n in (1, 2, 4)
}
# Registers of all columns of tile 1: [lanes][columns of K, of V][8].
KERNEL = """
template <int COLUMN>
void put_keys(u32* to, const u32* words, u32 first) {
  u32 of_column[8] = {
      key_register<COLUMN, 0>(words, first), key_register<COLUMN, 1>(words, first),
      key_register<COLUMN, 2>(words, first), key_register<COLUMN, 3>(words, first),
      key_register<COLUMN, 4>(words, first), key_register<COLUMN, 5>(words, first),
      key_register<COLUMN, 6>(words, first), key_register<COLUMN, 7>(words, first)};
  memcpy(to, of_column, 32);
  if constexpr (COLUMN + 1 < Keys::COLUMNS) put_keys<COLUMN + 1>(to + 8, words, first);
}
template <int COLUMN>
void put_values(u32* to, const u32* words) {
  u32 of_column[8] = {value_register<COLUMN, 0>(words), value_register<COLUMN, 1>(words),
                      value_register<COLUMN, 2>(words), value_register<COLUMN, 3>(words),
                      value_register<COLUMN, 4>(words), value_register<COLUMN, 5>(words),
                      value_register<COLUMN, 6>(words), value_register<COLUMN, 7>(words)};
  memcpy(to, of_column, 32);
  if constexpr (COLUMN + 1 < Values::COLUMNS) put_values<COLUMN + 1>(to + 8, words);
}
void read_codes(const Arguments& at) {
  Unit u;
  find_unit(at, u);
  memcpy(shared, at.packed_tiles + TILE_BYTES, TILE_BYTES);
  if (u.warp) return;
  u32 k[Keys::WORDS], v[Values::WORDS];
  load_words<Keys::WORDS>(k, 0, u.lane);
  load_words<Values::WORDS>(v, VALUES_AT, u.lane);
  u32* out = (u32*)at.partial + u.lane * 8 * (Keys::COLUMNS + Values::COLUMNS);
  put_keys<0>(out, k, u.lane & 2 ? 0 : ~0u);
  put_values<0>(out + 8 * Keys::COLUMNS, v);
}
"""
SPECS = {
    "columns": CALIBRATED,
    "halves": UNITS,
    "after whole columns": (
        TensorSpec(classes=((4, 3 / 8), (2, 3 / 8))),
        TensorSpec(classes=((4, 1 / 8), (2, 5 / 8), (1, 1 / 4))),
    ),
    "in tiles": SMALL_TILES,
}


@pytest.mark.parametrize(
    ("name", "head_dim"),
    [("columns", 128), ("halves", 64), ("after whole columns", 64), ("after whole columns", 80),
     ("in tiles", 80)],
)  # fmt: skip
def test_operands_hold_every_code_once(name: str, head_dim: int, tmp_path) -> None:
    torch.manual_seed(0)
    spans = BlockTable(torch.tensor([[0, 111]]))
    x = torch.randn(2, 1, 1, 111, head_dim) * torch.rand(head_dim)
    key, value = (pack_tensor(t, spec, spans) for t, spec in zip(x, SPECS[name], strict=True))
    records = to_class_records(key, value)
    form = records.format
    keys, values = np.split(registers_of(records, spans, tmp_path), [sum(form.key.columns)], axis=1)
    for packed, got in (
        (key, key_codes(keys, form.key)),
        (value, value_codes(values, form.value)),
    ):
        expected = np.zeros_like(got)
        expected[:47] = packed.unpacked()[0, 0, TILE:, : got.shape[1]].numpy()
        np.testing.assert_array_equal(got, expected)
    records.data.bitwise_xor_(0x10)  # a bit of every byte
    others = registers_of(records, spans, tmp_path)[:, : keys.shape[1]]
    with pytest.raises(AssertionError):  # of a code, or of what is filled up
        np.testing.assert_array_equal(key_codes(others, form.key), key_codes(keys, form.key))


def key_codes(registers: np.ndarray, classes: Classes) -> np.ndarray:
    """[tokens, ranks] from operands A of K, of which product with q takes every slot."""
    side, out = lanes.Side(classes), np.zeros((TILE, classes.places))
    for column in range(side.columns):
        for eight in range(8):
            codes = lanes.bytes_of(registers[:, column, eight], False) >> side.key_bit(column)
            for j in range(4):
                out[8 * eight + lanes.G, 16 * column + 4 * lanes.T + j] = codes[:, j]
    rank, by_rank = classes.rank_of_place.numpy(), np.zeros((TILE, classes.channels))
    assert not out[:, rank < 0].any()
    np.add.at(by_rank.T, rank[rank >= 0], out.T[rank >= 0])
    return by_rank


def value_codes(registers: np.ndarray, classes: Classes) -> np.ndarray:
    """[tokens, ranks] from operands A of V, whose rows are slots."""
    side, out = lanes.Side(classes), np.zeros((TILE, classes.places))
    for column in range(side.columns):
        for a in range(8):
            bit = side.value_bit(column, a % 2)
            codes = lanes.bytes_of(registers[:, column, a], False) >> bit
            for j in range(4):
                token = 32 * (a // 4) + 8 * (a // 2 % 2) + 2 * lanes.T + 16 * (j % 2) + j // 2
                out[token, 16 * column + 8 * (a % 2) + lanes.G] = codes[:, j]
    place = classes.place_of_rank.numpy()
    assert not np.delete(out, place, axis=1).any()
    return out[:, place]


def registers_of(records: ClassRecords, spans: BlockTable, folder) -> np.ndarray:
    """[lanes, columns of K, then of V, 8]."""
    form = records.format
    query = torch.zeros(1, form.head_dim)
    columns = sum(form.key.columns) + sum(form.value.columns)
    out = torch.zeros(32, columns, 8, dtype=torch.int32)
    given = class_decode.Arguments(
        query=query.data_ptr(), tokens=spans.offsets.data_ptr(), partial=out.data_ptr(),
        packed_tiles=records.data.data_ptr(), first_packed_tiles=records.first.data_ptr(),
        packed_tiles_per_head=records.data.shape[2], kv_heads=1, blocks=1, splits=1, sm_scale=1.0,
    )  # fmt: skip
    macros = class_decode.macros_of(form, 1) | {
        "CHANNELS": form.head_dim, "G": 1, "WARPS": 2, "STAGES": 3, "PAGED": 0, "QUERY": 2,
        "OUT": 2, "OVERLAP": 0, "MERGE": 0, "LATE": 0, "__CUDA_ARCH__": 900,
        "ARGUMENTS_BYTES": ctypes.sizeof(given),
    }  # fmt: skip
    beginning = runtime.source_text(class_decode.SOURCE).partition('extern "C" __global__')[0]
    words = LOADS | ASSEMBLY | LOADS
    compiled("read_codes", macros, folder, beginning + KERNEL, words)(given, (1, 1, 1), 64)
    return out.numpy().astype(np.int64) & 0xFFFFFFFF
