"""Parameters of 8 bits as lanes read them: the kernel's own source on a CPU, against torch."""

import ctypes

import pytest
import torch

from duotone.attention.cuda.classes import decode as class_decode
from duotone.attention.cuda.classes.layout import to_class_records
from duotone.attention.cuda.shared import runtime
from duotone.cache import BlockTable, pack_tensor
from duotone.quant.small_floats import MIDDLE, from_bytes

from cases import SMALL_TILES
from cuda_on_cpu import missing
from units_on_cpu import ASSEMBLY, compiled

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
HEAD_DIM, TOKENS = 80, 111
# Loads and conversions that this test does not leave out, by a word of each.
OWN = {
    '"=h"(exponents)': "memcpy(&exponents, at_shared(tile + EXPONENTS_AT), 2);",
    '"=h"(both)': "memcpy(&both, at_shared(address), 2);",
    '"=r"(both[0])': "memcpy(both, at_shared(address), 8);",
    '"=h"(numbers)': "memcpy(&numbers, at_shared(channels + CHANNELS_AT + 16 * COLUMN), 2);",
    '"=r"(first)': "first = numbers & 0xFF;",
    '"=r"(second)': "second = numbers >> 8;",
    '"=r"(x[3])': "memcpy(x, at_shared(address), 16);",
    "(first + h": "memcpy(&x, at_shared(first + h * D * 16), 4);",
    "(second + h": "memcpy(&y, at_shared(second + h * D * 16), 4);",
    "cvt.rn.f16x2": "d = float_to_half(low) | (u32)float_to_half(high) << 16;",
    ".reg .b16 low": "x[0] = half_to_float_here(pair), x[1] = half_to_float_here(pair >> 16);",
}
# From tile 1 of the first kv head: K's middles of a lane's channels, in pairs of fp16 under the
# tile's factor, and its two scales of each column; V's scale and zero-point of every channel.
KERNEL = """
void read_parameters(const Arguments& at) {
  __shared__ Prologue prologue;
  Unit u;
  find_unit(at, u);
  ValueParameters values;
  values.load(at, u);
  prologue.put_values(u, values);
  __syncthreads();
  memcpy(shared, at.packed_tiles + TILE_BYTES, TILE_BYTES);
  if (u.warp) return;
  Query q;
  q.load_factors(0);
  float* out = at.partial + u.lane * (D / 4 + 2 * Keys::COLUMNS + D / 32 * 2);
  for (int i = 0; i < D / 32; i++) {
    u32 pairs[4];
    float zeros[2];
    q.load_zeros(pairs, ZEROS_AT + 8 * u.t + 32 * i);
    for (int n = 0; n < 4; n++) {
      unpack2(zeros, pairs[n]);
      *out++ = zeros[0] * q.zero_factor, *out++ = zeros[1] * q.zero_factor;
    }
  }
  for (int column = 0; column < Keys::COLUMNS; column++, out += 2)
    q.load_scales(out, 4 * u.t + 2 * (u.g & 1) + SCALES_AT + 16 * column);
  for (int c = u.lane; c < D; c += 32, out += 2) {
    out[0] = out[1] = 0.f;
    if (c < CHANNELS) prologue.value_numbers(out, c);
  }
}
"""
# Offsets of tile 1 by lanes and tiles of heads. Products are left out: those with middles give 0.
OFFSETS = """
void find_offsets(const Arguments& at) {
  __shared__ Prologue prologue;
  Unit u;
  find_unit(at, u);
  ValueParameters values;
  values.load(at, u);
  KeyParameters keys;
  keys.load(at, u);
  QueryFours loaded;
  loaded.await(at, u);
  prologue.put_values(u, values);
  prologue.fold_query(at, u, keys, loaded);
  __syncthreads();
  memcpy(shared, at.packed_tiles + TILE_BYTES, TILE_BYTES);
  if (u.warp) return;
  Query q;
  q.make(at, u, prologue.table, prologue.heads, prologue.bias);
  q.fold(0, u);
  memcpy(at.partial + u.lane * HT, q.offset, sizeof q.offset);
}
"""


def test_lanes_read_what_torch_reads(tmp_path) -> None:
    torch.manual_seed(0)
    spans = BlockTable(torch.tensor([[0, TOKENS]]))
    x = torch.randn(2, 1, 1, TOKENS, HEAD_DIM) * torch.logspace(-5, 2, HEAD_DIM, 2)
    x = x + torch.randn(HEAD_DIM) * torch.logspace(1, -4, HEAD_DIM, 3)
    key, value = (pack_tensor(t, spec, spans) for t, spec in zip(x, SMALL_TILES, strict=True))
    records = to_class_records(key, value)
    form, order = records.format, key.channel_order[0, 0, 1]
    numbers = form.channels // 4 + 2 * sum(form.key.columns) + form.channels // 32 * 2
    out = lanes_of(records, spans, torch.zeros(1, HEAD_DIM), KERNEL, numbers, tmp_path)
    zeros, scales, values = out.split([form.channels // 4, 2 * sum(form.key.columns), 6], -1)

    expected = torch.zeros(form.channels)
    expected[order] = from_bytes(key.zero_point, MIDDLE)[0, 0, 1].float()
    for lane in range(32):
        channels = torch.arange(form.channels).view(-1, 4, 8)[:, lane % 4].flatten()
        assert torch.equal(zeros[lane], expected[channels])
    rank = form.key.rank_of_place
    by_place = key.scales[0, 0, 1].float()[rank].masked_fill(rank < 0, 0)
    for lane in range(32):
        places = torch.arange(form.key.places).view(-1, 16)[:, 4 * (lane % 4) :]
        own = by_place[places[:, 2 * (lane // 4 % 2) :][:, :2]]
        assert torch.equal(scales[lane], own.flatten())
    by_channel = torch.zeros(2, form.channels)
    of_values = torch.stack([value.full_scale, value.offset])[:, 0, 0, 0].float()
    by_channel[:, value.channel_order[0, 0, 0]] = of_values
    assert torch.equal(values.view(32, 3, 2).permute(2, 1, 0).flatten(1), by_channel)


@pytest.mark.parametrize("heads", [3, 6])
def test_keys_lie_half_of_their_levels_below_the_middle(heads: int, tmp_path) -> None:
    torch.manual_seed(0)
    spans = BlockTable(torch.tensor([[0, TOKENS]]))
    x = torch.randn(2, 1, 1, TOKENS, HEAD_DIM) * torch.logspace(-2, 1, HEAD_DIM)
    key, value = (pack_tensor(t, spec, spans) for t, spec in zip(x, SMALL_TILES, strict=True))
    query = torch.randn(heads, HEAD_DIM)
    tiles = -(-heads // 4)
    out = lanes_of(to_class_records(key, value), spans, query, OFFSETS, tiles, tmp_path)
    below = key.offset - from_bytes(key.zero_point, MIDDLE).float()
    expected = torch.zeros(4 * tiles)
    expected[:heads] = query[:, key.channel_order[0, 0, 1]] @ below[0, 0, 1]
    expected = expected.view(tiles, 4)[:, torch.arange(32) % 4].T
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def lanes_of(records, spans, query, kernel, numbers, folder) -> torch.Tensor:
    """Numbers of the lanes of the first warp, [32, numbers]. query: [heads, HEAD_DIM]."""
    form, group = records.format, len(query)
    out = torch.full((32, numbers), torch.nan)
    given = class_decode.Arguments(
        query=query.data_ptr(), tokens=spans.offsets.data_ptr(), partial=out.data_ptr(),
        packed_tiles=records.data.data_ptr(), first_packed_tiles=records.first.data_ptr(),
        packed_tiles_per_head=records.data.shape[2], kv_heads=1, blocks=1, splits=1, sm_scale=1.0,
        k_top=records.key_top.data_ptr(),
        **{
            f"v_{part}": getattr(records, f"value_{part}").data_ptr()
            for part in class_decode.PARAMETERS
        },
    )  # fmt: skip
    macros = class_decode.macros_of(form, group) | {
        "CHANNELS": HEAD_DIM, "G": group, "WARPS": 2, "STAGES": 3, "PAGED": 0, "QUERY": 2, "OUT": 2,
        "OVERLAP": 0, "MERGE": 0, "LATE": 0, "__CUDA_ARCH__": 900,
        "ARGUMENTS_BYTES": ctypes.sizeof(given),
    }  # fmt: skip
    beginning = runtime.source_text(class_decode.SOURCE).partition('extern "C" __global__')[0]
    name = "find_offsets" if kernel is OFFSETS else "read_parameters"
    function = compiled(name, macros, folder, beginning + kernel, OWN | ASSEMBLY | OWN)
    function(given, (1, 1, 1), 64)
    return out
