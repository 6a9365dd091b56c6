"""The source of `dense/decode.cu` on a CPU: which lane has what of K and V, of all their types."""

import ctypes

import pytest
import torch
from lanes_on_cpu import LANES, PRODUCTS

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
# Copies of a lane happen when it waits for them, not before.
COPIES = """
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
"""
INSTRUCTIONS = {
    'cvt.rn." KV_TYPE': "d = bits_of(low) | (u32)bits_of(high) << 16;",
    **PRODUCTS,
    "KV_TYPE": "multiply(c, a, b);",
    "x4.trans": "load_each(a, address, 4, true);",
    "x4.shared": "load_each(a, address, 4, false);",
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
    source = LANES + COPIES + runtime.source_text(dense_decode.SOURCE)
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
