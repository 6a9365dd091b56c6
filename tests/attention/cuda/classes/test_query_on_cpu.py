"""q in K's coded places: the source of `classes/query_of_spans.cuh` on a CPU, lane by lane."""

import ctypes

import numpy as np
import pytest
import torch

from duotone.attention.cuda.classes import decode as class_decode
from duotone.attention.cuda.classes.layout import ClassRecords, to_class_records
from duotone.attention.cuda.shared import runtime
from duotone.cache import BlockTable, pack_tensor
from duotone.quant import TensorSpec
from duotone.quant.small_floats import MIDDLE, SCALE, from_bytes, lowest_levels

import class_lanes as lanes
from cases import CALIBRATED, SMALL, UNITS
from cuda_on_cpu import missing
from units_on_cpu import compiled

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
WARPS, SM_SCALE = 2, 0.3
# What classes/decode.cu begins with, then q's digits, scales and offsets of the first warp's lanes.
KERNEL = """
void fold_query(const Arguments& at) {
  __shared__ Prologue prologue;
  Unit u;
  find_unit(at, u);
  ValueParameters values;
  values.load(at, u);
  KeyParameters keys;
  keys.load(at, u);
  QueryFours asked;
  asked.await(at, u);
  prologue.put_values(u, values);
  prologue.fold_query(at, u, keys, asked);
  __syncthreads();
  Query q;
  q.make(at, u, prologue.table, prologue.heads, prologue.bias);
  if (u.warp) return;
  float* out = at.partial + (u.row * 32 + u.lane) * HT * (Keys::COLUMNS + 2);
  for (int h = 0; h < HT; h++) {
    for (int r = 0; r < Keys::COLUMNS; r++) *out++ = __uint_as_float(q.digits[h][r]);
    *out++ = q.scale[h], *out++ = q.offset[h];
  }
}
"""
SPECS = {
    "columns": CALIBRATED,
    "halves": UNITS,
    "one width": (TensorSpec(2), UNITS[1]),
    "8 bits": SMALL,
}


def folded_query(records: ClassRecords, query: torch.Tensor, spans: BlockTable, folder):
    """(digits [units, lanes, tiles of heads, columns], scale, offset [units, lanes, tiles])."""
    form, group = records.format, query.shape[1] // records.shape[1]
    tiles, columns = -(-group // 4), sum(form.key.columns)
    units = len(query) * records.shape[1] * spans.blocks
    out = torch.full((units, 32, tiles, columns + 2), torch.nan)
    names = {"k": "key", "v": "value"}
    given = class_decode.Arguments(
        query=query.data_ptr(), tokens=spans.offsets.data_ptr(), partial=out.data_ptr(),
        packed_tiles=records.data.data_ptr(), first_packed_tiles=records.first.data_ptr(),
        packed_tiles_per_head=records.data.shape[2], kv_heads=records.shape[1],
        blocks=spans.blocks, splits=1, sm_scale=SM_SCALE,
        **{
            f"{short}_{part}": getattr(records, f"{names[short]}_{part}").data_ptr()
            for short in names
            for part in class_decode.PARAMETERS
        },
    )  # fmt: skip
    macros = class_decode.macros_of(form, group) | {
        "CHANNELS": form.head_dim, "G": group, "WARPS": WARPS, "STAGES": 3, "PAGED": 0, "QUERY": 2,
        "OUT": 2, "OVERLAP": 0, "MERGE": 0, "LATE": 0, "__CUDA_ARCH__": 900,
        "ARGUMENTS_BYTES": ctypes.sizeof(given),
    }  # fmt: skip
    beginning = runtime.source_text(class_decode.SOURCE).partition('extern "C" __global__')[0]
    grid = spans.blocks, records.shape[1], len(query)
    compiled("fold_query", macros, folder, beginning + KERNEL)(given, grid, WARPS * 32)
    digits = out[..., :columns].contiguous().view(torch.int32)
    return digits, out[..., columns], out[..., columns + 1]


@pytest.mark.parametrize(
    ("name", "head_dim", "group"),
    [
        ("columns", 64, 4),
        ("columns", 80, 7),
        ("halves", 64, 1),
        ("halves", 80, 6),
        ("one width", 64, 7),
        ("one width", 80, 4),
        ("8 bits", 80, 4),
        ("8 bits", 64, 1),
    ],
)
def test_digits_are_those_of_the_lanes(name: str, head_dim: int, group: int, tmp_path) -> None:
    torch.manual_seed(0)
    spans = BlockTable(torch.tensor([[0, 100, 211], [0, 63, 64]]))
    x = torch.randn(2, 2, 2, 211, head_dim) * torch.rand(head_dim) + torch.randn(head_dim)
    key, value = (pack_tensor(t, spec, spans) for t, spec in zip(x, SPECS[name], strict=True))
    records = to_class_records(key, value)
    query = torch.randn(2, 2 * group, head_dim)
    digits, scale, offset = folded_query(records, query, spans, tmp_path)
    side = lanes.Side(records.format.key)
    for unit in range(len(digits)):
        sequence, head, span = unit // 4, unit // 2 % 2, unit % 2
        q = query[sequence, head * group : (head + 1) * group].double().numpy()
        q = np.pad(q, ((0, -group % 4), (0, 0)))
        folded, sums = expected_query(records, q, (sequence, head, span))
        top = np.abs(folded).max(1).clip(1e-20)
        for tile in range(len(q) // 4):
            mine = slice(4 * tile, 4 * tile + 4)
            integers = folded[mine] * (lanes.Q_TOP / top[mine])[:, None]
            for column, want in enumerate(lanes.span_digits(integers, side)):
                got = digits[unit, :, tile, column].numpy().astype(np.int64)
                assert np.abs(numbers_of(got) - numbers_of(want)).max() <= 1
            heads = 4 * tile + lanes.T
            of_lane = scale[unit, :, tile], offset[unit, :, tile]
            np.testing.assert_allclose(of_lane[0], top[heads] * SM_SCALE / lanes.Q_TOP, rtol=1e-5)
            np.testing.assert_allclose(of_lane[1], sums[heads] * SM_SCALE, rtol=1e-4, atol=1e-4)


def expected_query(
    records: ClassRecords, q: np.ndarray, row: tuple[int, int, int]
) -> tuple[np.ndarray, np.ndarray]:
    """(q times K's scales in its places, q times K's zero-points) of a kv head and span."""
    classes = records.format.key
    parts = (getattr(records, f"key_{part}")[row] for part in class_decode.PARAMETERS)
    scale, zero, order = parts
    if records.format.key_small:
        scale, zero = from_bytes(scale, SCALE), from_bytes(zero, MIDDLE)
        zero = lowest_levels(scale, zero, classes.top_of_rank(len(zero)))
    scale, zero, order = (part.double().numpy() for part in (scale, zero, order))
    in_order = q[:, order.astype(int)]
    folded = np.zeros((len(q), classes.places))
    rank = classes.rank_of_place.numpy()
    coded = in_order[:, : classes.channels] * scale
    folded[:, rank >= 0] = coded[:, rank[rank >= 0]]
    return folded, in_order @ zero


def numbers_of(register: np.ndarray) -> np.ndarray:
    """Four integers of each pair of lanes, high digits in even columns of B, low in odd ones."""
    digits = lanes.bytes_of(register & 0xFFFFFFFF, True)
    even = lanes.G % 2 == 0
    return digits[even] * 256 + digits[~even]


def test_another_order_of_channels_is_noticed(tmp_path) -> None:
    torch.manual_seed(0)
    spans = BlockTable(torch.tensor([[0, 100]]))
    x = torch.randn(2, 1, 1, 100, 64)
    key, value = (pack_tensor(t, spec, spans) for t, spec in zip(x, UNITS, strict=True))
    records, query = to_class_records(key, value), torch.randn(1, 4, 64)
    before, *_ = folded_query(records, query, spans, tmp_path)
    records.key_order[..., :2] = records.key_order[..., :2].flip(-1)
    after, *_ = folded_query(records, query, spans, tmp_path)
    changed = (before != after).any(1).squeeze()
    assert changed.tolist() == [True, False, False, False]
