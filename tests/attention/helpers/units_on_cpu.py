"""Units of work, the ring and merging on a CPU: our headers, a kernel that adds.

A record holds a number per channel; with codes apart some of it lies in buffers of their own. The
kernel's "weights" are 1 under a maximum that differs between warps, so that its output is the mean
of a kv head's records, times the q head's number.
Assembly of the headers is replaced; copies happen as soon, or as late, as they may.
"""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

from duotone.attention.cuda.shared import runtime
from duotone.attention.cuda.shared.work import Call
from duotone.tools import nvrtc

from cuda_on_cpu import MAIN, built, grid_of

FILES = {
    "merge_parts": "shared/merge_parts.cu",
    "rotate_queries": "rotate/queries.cu",
    "merge_rotated": "rotate/merge.cu",
}
CHANNELS, PACKED_TILE_BYTES, KEYS, WARPS = 32, 512, 4, 2
KERNEL = """
#define HEADS 4
#define D CHANNELS
#define ONE_RUN
#define PIECES_BYTES (PACKED_TILE_BYTES + K_SEPARATE_BYTES + V_SEPARATE_BYTES)
#define SLOT_BYTES PIECES_BYTES
#include "shared/common.cuh"
#include "groups/separate.cuh"
// The sum of a packed tile's numbers of a lane, of those that are there.
static float sum_of(const float* packed_tile, int lane, int left) {
  float sum = 0.f;
  for (int k = 0; k < KEYS && k < left; k++) sum += packed_tile[k * CHANNELS + lane];
  return sum;
}
void add_packed_tiles(const Arguments& at) {
  __shared__ float all_ml[SUB_BLOCKS][WARPS][HEADS][2];
  __shared__ int flags[SUB_BLOCKS], draws[SUB_BLOCKS];
  __shared__ u64 barriers[SUB_BLOCKS * WARPS * STAGES];
  begin();
#if EARLY
  Unit u;
  find_sub_block(u);
#else
  GroupUnit u;
  u.find(at);
#endif
  char* memory = shared + u.sub_block * RINGS_BYTES;
  float(*ml)[HEADS][2] = all_ml[u.sub_block];
  Ring ring;
  ring.make(u, memory, barriers + u.sub_block * WARPS * STAGES, draws + u.sub_block);
#if EARLY
  const UnitTokens tokens = find_tokens(at, u);
  ring.start_early<PIECES_BYTES, 0>(at, u, tokens);
#else
  ring.start<PIECES_BYTES, 0>(u);
#endif
  ring.reset(u);
  const float q = at.query[u.head * G * CHANNELS];
  sync_sub_block(u);
  float sum = 0.f, weight = 0.f;
  const float* before = nullptr;  // read while the next one is, like V of the tile before
  int left_before = 0;
  while (ring.current < u.last) {
    int next;
    const int left = u.length - ring.current * KEYS;
#if BETWEEN
    const float* here = (const float*)at_shared(ring.take_current());
    if (before) sum += sum_of(before, u.lane, left_before);
    if (STAGES == IN_FLIGHT + 1) __syncwarp();
    next = ring.refill<PIECES_BYTES, 0>(u);
#else
    const float* here = (const float*)at_shared(ring.take<PIECES_BYTES, 0>(u, next));
    if (before && STAGES > 2) sum += sum_of(before, u.lane, left_before);
    if (STAGES == 2) sum += sum_of(here, u.lane, left);
#endif
    ring.advance(next);
    before = here, left_before = left, weight += left < KEYS ? left : KEYS;
  }
  if (before && STAGES > 2) sum += sum_of(before, u.lane, left_before);
  ring.leave();
  assert(nothing_is_in_flight());
  float* rows = sums_of(memory, u.warp);
  const float top = weight > 0 ? u.warp : -1e30f, unit = exp2f(-u.warp);
  for (int h = 0; h < G; h++) rows[h * (D + 8) + u.lane] = sum * unit * q * (h + 1);
  if (u.lane < HEADS) ml[u.warp][u.lane][0] = top, ml[u.warp][u.lane][1] = weight * unit;
  finish(at, u, memory, ml, flags + u.sub_block, 0.f, [](int, float, float x) { return x; });
}
"""
# What assembly does, by a word of it.
ASSEMBLY = {
    "ex2.approx": "y = exp2f(x);",
    "shfl.sync.idx": "y = x;",
    "barrier.sync": "meet_some(u.sub_block + 1, WARPS * 32);",
    "mbarrier.init": "*(u64*)at_shared(barrier + 8 * s) = 0;",
    "mbarrier.try_wait": "while (!passed(barrier, phase)) yield();",
    "mbarrier.arrive": "wait_for_bytes(BYTES, barrier);",
    "cp.async.bulk.shared": "copy(address + offset, source, BYTES, barrier);",
    "cp.async.cg": "copy(address + offset + at, source + at, 16, 0);",
    "wait_group": "arrive(0);",
    "atom.acq_rel": "before = (*counter)++;",
    "atom.shared": "next = (*(int*)at_shared(counter))++;",
    "fence.": "",
    "commit_group": "",
    "griddepcontrol": "",
    "cvt.f32.f16 %0,%1;": "y = half_to_float_here(x);",
    "lop3.b32": "y = (low & 0x33333333) | (high & 0xCCCCCCCC);",
    # Not reached, but for the biases, which products name as well.
    "mma.sync": "",
    "(bias[0])": "memcpy(bias, from, 16);",
    "(ones[0])": "",
    "cvt.rn.f16x2": "",
    ".reg .b16 low": "",
}
PRELUDE = """
#include <cassert>
#include <deque>
#include <map>
#define INPUT 2
#define half_to_float half_to_float_here
#define shared_address address_here
{header}
#undef half_to_float
#undef shared_address
#undef FULL
struct alignas(16) int4 {{ int x, y, z, w; }};
struct float2 {{ float x, y; }};
static float2 make_float2(float x, float y) {{ return {{x, y}}; }}
static float4 make_float4(float x, float y, float z, float w) {{ return {{x, y, z, w}}; }}
template <class T>
static void __stcg(T* at, T x) {{ *at = x; }}
static float __int_as_float(int x) {{ return __uint_as_float(x); }}
static int __float_as_int(float x) {{ return __float_as_uint(x); }}
#define __log2f log2f
// Variables in shared memory are anywhere: addresses count from one of them.
static size_t __cvta_generic_to_shared(const void* p) {{ return (const char*)p - shared; }}
static char* at_shared(u32 address) {{ return shared + (int)address; }}
struct Copy {{ u32 to; const char* from; int bytes; u32 barrier; unsigned warp; }};
static std::deque<Copy> copies;
static std::map<u32, int> expected;  // bytes that a barrier waits for
static void wait_for_bytes(int bytes, u32 barrier) {{
  assert(expected[barrier] == 0);
  expected[barrier] = bytes;
}}
static void run(const Copy& x) {{
  memcpy(at_shared(x.to), x.from, x.bytes);
  if (x.barrier && !(expected[x.barrier] -= x.bytes)) ++*(u64*)at_shared(x.barrier);  // its phase
}}
static void copy(u32 to, const char* from, int bytes, u32 barrier) {{
  copies.push_back({{to, from, bytes, barrier, threadIdx.x / 32}});
  if (!LATE) run(copies.back()), copies.pop_back();
}}
// Lets the copies of a barrier, or of a warp, happen.
static void arrive(u32 barrier) {{
  for (size_t i = 0; i < copies.size();)
    if (barrier ? copies[i].barrier == barrier : copies[i].warp == threadIdx.x / 32)
      run(copies[i]), copies.erase(copies.begin() + i);
    else
      i++;
}}
// Of this warp's copies.
static bool nothing_is_in_flight() {{
  for (const Copy& x : copies)
    if (x.warp == threadIdx.x / 32) return false;
  return true;
}}
static bool passed(u32 barrier, u32 phase) {{
  arrive(barrier);
  return (*(u64*)at_shared(barrier) & 1) != phase;
}}
"""
STATEMENT = re.compile(
    r'\basm\s*(?:volatile)?\s*\((?:[^()"]|"[^"]*"|\((?:[^()]|\([^()]*\))*\))*\);'
)


def _in_cpp(match: re.Match, assembly: dict[str, str]) -> str:
    text = match[0]
    return next((code or ";" for word, code in assembly.items() if word in text), text)


def compiled(
    name: str,
    macros: dict[str, int],
    folder: Path,
    kernel: str = KERNEL,
    assembly: dict[str, str] = ASSEMBLY,
) -> Callable[[Call, int | tuple[int, int, int], int], None]:
    """A function of a file of its name, or of `kernel`, as one of arguments, blocks, threads."""
    text = runtime.source_text(FILES[name]) if name in FILES else kernel
    text = nvrtc.INCLUDE.sub(lambda match: runtime.source_text(match[1]), text)
    text = STATEMENT.sub(lambda match: _in_cpp(match, assembly), text)
    text = re.sub(r"^ *(#pragma unroll|extern __shared__).*$", "", text, flags=re.M)
    header = Path(__file__).with_name("cuda_on_cpu.h").read_text()
    defined = "".join(f"#define {k} {v}\n" for k, v in macros.items())
    text = defined + PRELUDE.format(header=header) + text + MAIN.format(name=name)
    launch = built(text, folder)
    return lambda given, blocks, threads: launch(ctypes.byref(given), *grid_of(blocks), threads)
