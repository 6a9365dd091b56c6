"""Levels that products of group records meet: the source of `groups/along_rows.cuh` on a CPU."""

import pytest
import torch
from group_specs import CASES

from duotone.attention.cuda.groups.format import TILE, GroupFormat, Operand
from duotone.attention.cuda.groups.layout import to_group_records
from duotone.attention.cuda.shared.work import Call
from duotone.cache import BlockTable, pack_tensor

from cuda_on_cpu import missing
from units_on_cpu import ASSEMBLY, compiled

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
HEAD_DIM, UNIT = 64, 2.0**8
# A product leaves its operand A behind: [row tile][chunk][lane][4 registers].
KERNEL = """
#define HT 1
#define TWO_TO(E) ((u32)((15 + (E)) << 10) * 0x00010001u)
#include "shared/call.cuh"
static u32 of_halves(u32 a, u32 b, u32 c) {
  u32 y = 0;
  for (int i = 0; i < 32; i += 16) {
    _Float16 x[3], sum;
    u16 in[3] = {(u16)(a >> i), (u16)(b >> i), (u16)(c >> i)}, out;
    memcpy(x, in, 6);
    sum = (_Float16)((double)x[0] * (double)x[1] + (double)x[2]);  // exact but for this rounding
    memcpy(&out, &sum, 2);
    y |= (u32)out << i;
  }
  return y;
}
static u32 fma2(u32 a, u32 b, u32 c) { return of_halves(a, b, c); }
static u32 mul2(u32 a, u32 b) { return of_halves(a, b, 0x80008000u); }
static bool __any_sync(u32, bool x) {
  const u32 all = __ballot_sync(FULL, x);
  assert(all == 0 || all == FULL);
  return all;
}
static u32 (*left_behind)[4];
static float (*first_c)[HT][4];
static const u32 (*first_b)[HT][2];
static int chunks, lane_now;
static void mma(float* c, const u32* a, const u32* b) {
  const int tile = (float(*)[HT][4])c - first_c, chunk = (const u32(*)[HT][2])b - first_b;
  memcpy(left_behind[(tile * chunks + chunk) * 32 + lane_now], a, 16);
}
#include "groups/along_rows.cuh"
struct Arguments : Call {};
void read_levels(const Arguments& at) {
  typedef AlongRows<A_ROWS, A_CHUNKS, A_BITS, A_GROUP> Operand;
  if (threadIdx.x == 0) memcpy(shared, at.packed_tiles, A_BYTES);
  __syncthreads();
  const int lane = threadIdx.x;
  Operand x;
  x.load(0, lane);
  float c[A_ROWS][HT][4];
  u32 b[A_CHUNKS][HT][2];
  const bool wide = Operand::is_wide(A_PARAMS);
  left_behind = (u32(*)[4])at.partial, first_c = c, first_b = b, chunks = A_CHUNKS, lane_now = lane;
  if (wide)  // as `multiply` chooses; lanes take turns, so that nothing yields below
    x.multiply_levels<true>(c, b, A_PARAMS, lane % 4);
  else
    x.multiply_levels<false>(c, b, A_PARAMS, lane % 4);
}
"""
LEVELS = """
  u32 w[4];
  memcpy(w, at_shared(from), 16);
  levels[0].step = w[0], levels[1].step = w[1], zero[0] = w[2], zero[1] = w[3];
"""
READS = {
    "(out[4 * i])": "memcpy(out + 4 * i, at_shared(base + i * 512 + lane * 16), 16);",
    "(out[2 * i])": "memcpy(out + 2 * i, at_shared(base + i * 256 + lane * 8), 8);",
    "(out[i])": "memcpy(out + i, at_shared(base + i * 128 + lane * 4), 4);",
    "(levels[0].step)": LEVELS,
    "(first)": "memcpy(&first, at_shared(params), 4);",
}


def operand_as_read(codes, params, form: Operand, rows: int, k: int, folder) -> torch.Tensor:
    """[rows, k], from the fp16 registers of A."""
    tile = torch.cat([codes, params]).contiguous()
    out = torch.full((rows // 16, k // 16, 32, 8), torch.nan, dtype=torch.float16)
    given = Call(packed_tiles=tile.data_ptr(), partial=out.data_ptr())
    macros = {
        "CHANNELS": HEAD_DIM, "G": 1, "QUERY": 2, "OUT": 2, "OVERLAP": 0, "LATE": 0,
        "A_ROWS": rows // 16, "A_CHUNKS": k // 16, "A_BITS": form.bits, "A_GROUP": form.group,
        "A_BYTES": tile.numel(), "A_PARAMS": codes.numel(), "__CUDA_ARCH__": 900,
    }  # fmt: skip
    compiled("read_levels", macros, folder, KERNEL, READS | ASSEMBLY)(given, 1, 32)
    # A of mma.m16n8k16: lane 4 g + t has {rows g, g + 8} x {k 2 t, + 8} x sides, registers in turn.
    lanes = out.view(rows // 16, k // 16, 8, 4, 2, 2, 2).permute(0, 5, 2, 1, 4, 3, 6)
    return lanes.reshape(rows, k).float() * UNIT


@pytest.mark.parametrize("swing", [1.0, 40.0, 1500.0, 20000.0])
@pytest.mark.parametrize("name", ["kivi", "kivi1", "kivi4"])
def test_lanes_read_levels_to_one_rounding(name: str, swing: float, folder) -> None:
    torch.manual_seed(0)
    x = [torch.randn(1, 1, 64, HEAD_DIM) + torch.randn(HEAD_DIM) for _ in range(2)]
    for t in x:
        t[..., ::32, 3] = swing
        t[:, :, 7::8, ::11] = -swing
    table = BlockTable(torch.tensor([[0, 64]]))
    key, value = (pack_tensor(t, spec, table) for t, spec in zip(x, CASES[name], strict=True))
    operands = [Operand(spec.bits, False, spec.group, False) for spec in CASES[name]]
    form = GroupFormat(HEAD_DIM, *operands)
    tiles = to_group_records(key, value, form).view(-1, form.own_tile_bytes)
    k_codes, v_codes, k_params, v_params = tiles[0].split(form.part_bytes)
    sizes = (TILE, HEAD_DIM), (HEAD_DIM, TILE)
    keys = operand_as_read(k_codes, k_params, form.key, *sizes[0], folder)
    values = operand_as_read(v_codes, v_params, form.value, *sizes[1], folder).T
    for read, packed in ((keys, key), (values, value)):
        expected = packed.dequantize()[0, 0, :TILE].float()
        # Scaled by 2^-8 they have 11 bits, or are multiples of the least of fp16.
        most = expected.abs() * 2.0**-11 + UNIT * 2.0**-25
        assert ((read - expected).abs() <= most).all()
        assert (read - expected).abs().max() > 0 or swing == 1.0


def test_a_wrong_scale_is_noticed(folder) -> None:
    torch.manual_seed(0)
    form = GroupFormat(HEAD_DIM, *(Operand(2, False, 32, False),) * 2)
    x = 300 * torch.randn(1, 1, 32, HEAD_DIM)
    table = BlockTable(torch.tensor([[0, 32]]))
    key, value = (pack_tensor(x, spec, table) for spec in CASES["kivi"])
    codes, _, params, _ = (
        to_group_records(key, value, form).view(-1, form.own_tile_bytes)[0].split(form.part_bytes)
    )
    right, wrong = params.clone(), params.clone()
    wrong[1] ^= 4  # an exponent
    read = [operand_as_read(codes, p, form.key, TILE, HEAD_DIM, folder) for p in (right, wrong)]
    assert not torch.equal(*read)
    assert torch.equal(read[0][:, 2:], read[1][:, 2:])
