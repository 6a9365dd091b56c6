"""The source of `dense/decode.cu` on a CPU: which lane has what of K and V, of all their types."""

import ctypes

import pytest
import torch

from duotone.attention import attend
from duotone.attention.cuda.dense import decode as dense_decode
from duotone.attention.cuda.dense.decode import DenseFormat
from duotone.attention.cuda.shared import runtime
from duotone.attention.cuda.shared.launch import LOG2E
from duotone.cache import DenseSegment

from cases import assert_near
from cuda_on_cpu import missing
from units_on_cpu import ASSEMBLY, compiled

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))
FP16, BF16 = torch.float16, torch.bfloat16
LENGTHS, SLOTS, KV_HEADS = (1, 63, 100, 0, 144), 160, 2
# What the kernel's assembly does. Copies of a lane happen when it waits for them, not before.
LANES = """
static u32 told[8][32][6];
struct Asked { int group; u32 to; const char* from; bool real; };
static std::deque<Asked> asked[256];
static int groups[256];
static void ask_later(u32 to, const char* from, bool real) {
  assert((size_t)(shared + to) % 16 == 0 && (size_t)from % 16 == 0);
  asked[threadIdx.x].push_back({groups[threadIdx.x], to, from, real});
}
static void wait_but_for(int late) {
  auto& mine = asked[threadIdx.x];
  for (; !mine.empty() && mine[0].group < groups[threadIdx.x] - late; mine.pop_front())
    if (mine[0].real) memcpy(shared + mine[0].to, mine[0].from, 16);
    else memset(shared + mine[0].to, 0, 16);
}
static bool __any_sync(u32 mask, bool x) { return __ballot_sync(mask, x); }
static float number_of(u16 x) {
  return KV == 1 ? __uint_as_float((u32)x << 16) : half_to_float_here(x);
}
static u16 bits_of(float x) {
  const u32 bits = __float_as_uint(x);
  return KV == 1 ? (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 : float_to_half(x);
}
static u32 (*tell(const u32* x, int words))[6] {
  const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  memcpy(told[warp][lane], x, 4 * words);
  __syncwarp();
  return told[warp];
}
static void load_each(u32* y, u32 row, int matrices, bool turned) {
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  auto rows = tell(&row, 1);
  for (int m = 0; m < matrices; m++) {
    u16 halves[2];
    for (unsigned i = 0; i < 2; i++) {
      const unsigned r = turned ? 2 * t + i : g, column = turned ? g : 2 * t + i;
      memcpy(halves + i, shared + rows[8 * m + r][0] + 2 * column, 2);
    }
    y[m] = halves[0] | (u32)halves[1] << 16;
  }
  __syncwarp();
}
static u32 turned(u32 x) {
  const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  auto all = tell(&x, 1);
  u32 y = 0;
  for (unsigned i = 0; i < 2; i++)
    y |= (all[4 * (2 * t + i) + g / 2][0] >> 16 * (g % 2) & 0xFFFF) << 16 * i;
  __syncwarp();
  return y;
}
static void multiply(float* c, const u32* a, const u32* b) {
  const unsigned g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const u32 mine[6] = {a[0], a[1], a[2], a[3], b[0], b[1]};
  auto all = tell(mine, 6);
  for (unsigned i = 0; i < 4; i++)
    for (unsigned k = 0; k < 16; k++) {
      const u32 x = all[4 * g + k % 8 / 2][i / 2 + k / 8 * 2];
      const u32 y = all[4 * (2 * t + i % 2) + k % 8 / 2][4 + k / 8];
      c[i] += number_of(x >> 16 * (k % 2)) * number_of(y >> 16 * (k % 2));
    }
  __syncwarp();
}
"""
INSTRUCTIONS = {
    'cvt.rn." KV_TYPE': "d = bits_of(low) | (u32)bits_of(high) << 16;",
    "KV_TYPE": "multiply(c, a, b);",
    "x4.trans": "load_each(a, address, 4, true);",
    "x4.shared": "load_each(a, address, 4, false);",
    "movmatrix": "y = turned(x);",
    "[%1],16,%2;": "ask_later(to, from, real);",
    "wait_group %0": "wait_but_for(STAGES - 2);",
    "cp.async.commit_group": "groups[threadIdx.x]++;",
}


def poisoned(x: torch.Tensor) -> torch.Tensor:
    """NaN in the slots after each sequence's tokens."""
    for b, length in enumerate(LENGTHS):
        x[b, :, length:] = torch.nan
    return x


def attended(query, key, value, form: DenseFormat, warps: int, folder) -> torch.Tensor:
    """Output of the kernel."""
    batch, q_heads, _, head_dim = query.shape
    out, lengths, size = torch.empty_like(query), torch.tensor(LENGTHS), key.itemsize
    given = dense_decode.Arguments(
        query=query.data_ptr(), key=key.data_ptr(), value=value.data_ptr(), out=out.data_ptr(),
        key_batch=size * key.stride(0), key_head=size * key.stride(1),
        value_batch=size * value.stride(0), value_head=size * value.stride(1),
        tokens=lengths.data_ptr(), out_stride=head_dim, kv_heads=KV_HEADS, blocks=1, splits=1,
        all_parts=1, units=batch * KV_HEADS, sm_scale=head_dim**-0.5 * LOG2E,
    )  # fmt: skip
    macros = dense_decode.macros_of(form, key.dtype) | {
        "CHANNELS": head_dim, "G": q_heads // KV_HEADS, "WARPS": warps, "PER_SM": 1,
        "STAGES": form.stages, "PAGED": 0, "QUERY": 2, "OUT": 2, "OVERLAP": 0, "MERGE": 0,
        "LATE": 0, "__CUDA_ARCH__": 900, "ARGUMENTS_BYTES": ctypes.sizeof(given),
    }  # fmt: skip
    source = LANES + runtime.source_text(dense_decode.SOURCE)
    run = compiled("dense_decode", macros, folder, source, INSTRUCTIONS | ASSEMBLY)
    run(given, (1, KV_HEADS, batch), warps * 32)
    return out


def assert_attends(dtype, form: DenseFormat, group: int, warps: int, folder) -> None:
    torch.manual_seed(0)
    shape = (len(LENGTHS), KV_HEADS, SLOTS, form.head_dim)
    key, value = (poisoned(torch.randn(shape).to(dtype)) for _ in range(2))
    query = torch.randn(len(LENGTHS), KV_HEADS * group, 1, form.head_dim)
    out = attended(query, key, value, form, warps, folder)
    # The reference multiplies hidden keys, too.
    real = DenseSegment(key.float().nan_to_num(0), value.float(), torch.tensor(LENGTHS))
    expected = attend(query.double(), [real], sm_scale=form.head_dim**-0.5).float()
    assert_near(out, expected.masked_fill(torch.tensor(LENGTHS)[:, None, None, None] == 0, 0))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "group", "warps"),
    [
        (BF16, 128, 4, 2),
        (BF16, 96, 7, 1),
        (FP16, 64, 1, 4),
        (FP16, 256, 4, 1),
        (FP16, 64, 4, 2),
        (BF16, 80, 6, 4),
    ],
    ids=str,
)
def test_matches_the_reference(dtype, head_dim, group, warps, tmp_path) -> None:
    assert_attends(dtype, DenseFormat(head_dim), group, warps, tmp_path)


@pytest.mark.parametrize(("tokens", "stages"), [(16, 3), (32, 2), (32, 3)])
def test_records_may_be_longer_or_more(tokens, stages, tmp_path) -> None:
    form = DenseFormat(64, tokens, stages)
    assert_attends(FP16, form, 6, 2, tmp_path)


@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=str)
@pytest.mark.parametrize("which", ["key", "value"])
def test_what_is_no_number_is_none_in_the_output(which: str, number: float, tmp_path) -> None:
    torch.manual_seed(0)
    shape, group = (len(LENGTHS), KV_HEADS, SLOTS, 64), 4
    states = {name: poisoned(torch.randn(shape).to(FP16)) for name in ("key", "value")}
    # Positive, since a score of -inf has no weight and is right.
    query = torch.randn(len(LENGTHS), KV_HEADS * group, 1, 64).abs()
    before = attended(query, *states.values(), DenseFormat(64), 2, tmp_path)
    states[which][2, 1, 40, 7] = number  # of a sequence of 100 tokens
    found = attended(query, *states.values(), DenseFormat(64), 2, tmp_path)
    read = found[2, group:]
    assert not (read if which == "key" else read[..., 7]).isfinite().any()
    others = torch.ones_like(found, dtype=torch.bool)
    others[2, group:] = False
    assert torch.equal(found[others], before[others])
