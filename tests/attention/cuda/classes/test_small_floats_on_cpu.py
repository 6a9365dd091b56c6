"""Parameters of 8 bits as lanes read them: the kernel's own source on a CPU, against torch."""

import ctypes

import pytest
import torch

from duotone.attention.cuda.classes import decode as class_decode
from duotone.attention.cuda.classes.layout import to_class_records
from duotone.attention.cuda.shared import runtime
from duotone.cache import BlockTable, pack_tensor

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
    "cvt.rn.f16x2": "d = float_to_half(low) | (u32)float_to_half(high) << 16;",
    ".reg .b16 low": "x[0] = half_to_float_here(pair), x[1] = half_to_float_here(pair >> 16);",
}
# From tile 1 of the first kv head: K's zero-points of a lane's channels, in pairs of fp16 under the
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
  for (int c = u.lane; c < D; c += 32, out += 2) unpack2(out, c < CHANNELS ? prologue.value[c] : 0);
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
    out = lanes_of(records, spans, tmp_path)
    zeros, scales, values = out.split([form.channels // 4, 2 * sum(form.key.columns), 6], -1)

    expected = torch.zeros(form.channels)
    expected[order] = key.offset[0, 0, 1].float()
    for lane in range(32):
        channels = torch.arange(form.channels).view(-1, 4, 8)[:, lane % 4].flatten()
        assert torch.equal(zeros[lane], expected[channels])
    by_place = torch.zeros(form.key.places)
    by_place[form.key.place_of_rank] = key.scales[0, 0, 1].float()
    for lane in range(32):
        places = torch.arange(form.key.places).view(-1, 16)[:, 4 * (lane % 4) :]
        own = by_place[places[:, 2 * (lane // 4 % 2) :][:, :2]]
        assert torch.equal(scales[lane], own.flatten())
    by_channel = torch.zeros(2, form.channels)
    of_values = torch.stack([value.full_scale, value.offset])[:, 0, 0, 0].float()
    by_channel[:, value.channel_order[0, 0, 0]] = of_values
    assert torch.equal(values.view(32, 3, 2).permute(2, 1, 0).flatten(1), by_channel)


def lanes_of(records, spans, folder) -> torch.Tensor:
    """Numbers of the lanes of the first warp, [32, n]."""
    form = records.format
    numbers = form.channels // 4 + 2 * sum(form.key.columns) + form.channels // 32 * 2
    out, query = torch.full((32, numbers), torch.nan), torch.zeros(1, 1, HEAD_DIM)
    given = class_decode.Arguments(
        query=query.data_ptr(), tokens=spans.offsets.data_ptr(), partial=out.data_ptr(),
        packed_tiles=records.data.data_ptr(), first_packed_tiles=records.first.data_ptr(),
        packed_tiles_per_head=records.data.shape[2], kv_heads=1, blocks=1, splits=1, sm_scale=1.0,
        **{
            f"v_{part}": getattr(records, f"value_{part}").data_ptr()
            for part in class_decode.PARAMETERS
        },
    )  # fmt: skip
    macros = class_decode.macros_of(form, 1) | {
        "CHANNELS": HEAD_DIM, "G": 1, "WARPS": 2, "STAGES": 3, "PAGED": 0, "QUERY": 2, "OUT": 2,
        "OVERLAP": 0, "MERGE": 0, "LATE": 0, "__CUDA_ARCH__": 900,
        "ARGUMENTS_BYTES": ctypes.sizeof(given),
    }  # fmt: skip
    beginning = runtime.source_text(class_decode.SOURCE).partition('extern "C" __global__')[0]
    function = compiled("read_parameters", macros, folder, beginning + KERNEL, OWN | ASSEMBLY | OWN)
    function(given, (1, 1, 1), 64)
    return out
