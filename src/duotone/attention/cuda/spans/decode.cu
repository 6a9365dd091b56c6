// Decode attention on packed K and V whose scales belong to whole spans of tokens.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V; D: padded to a multiple of 32 in the codes
//   KB, VB    bits per code of K and of V, of WIDTHS in layout.py
//   SMALL_PARAMETERS  1: scales and zero-points have 8 bits; 0: they are fp16
//   TILES     tiles of 64 tokens in a packed tile
//   G         q heads per kv head
//   TAU       1: score calibration; all blocks of a kv head must be resident together
//   WARPS     of a sub-block, which does one unit; SUB_BLOCKS: of a block
//   PER_SM    blocks that a multiprocessor has room for: a bound of registers
//   STAGES, IN_FLIGHT, IN_TURN  slots and loads of a warp's ring (shared/ring.cuh)
//   PAGED, MERGE  where packed tiles lie, and who merges parts (shared/common.cuh)
//   QUERY, OUT    types of q and of the output: 0 float16, 1 bfloat16, 2 float32
//   OVERLAP       how the launch begins (shared/call.cuh)
//   ARGUMENTS_BYTES  size of Arguments on the host
#include "spans/shapes.cuh"
#include "spans/query.cuh"
#include "spans/range.cuh"
#include "spans/sums.cuh"

// True where q is waited for before the first packed tiles are loaded. After those its answer takes
// microseconds. But loads while the previous kernel still runs gain more where a packed tile is
// soon worked off, as with more bits.
#define QUERY_FIRST (KB == 1 && VB == 1)
#define FIRST_BYTES (TAU ? TILES * K_BYTES : PACKED_TILE_BYTES)
static_assert(SUB_BLOCKS == 1 || !TAU, "calibration is agreed on by blocks");

extern "C" __global__ void __launch_bounds__(SUB_BLOCKS * WARPS * 32, PER_SM)
    span_decode(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(1024) char rings[];
  __shared__ Prologue prologues[SUB_BLOCKS];
  __shared__ float all_ml[SUB_BLOCKS][WARPS][HEADS][2];
  __shared__ int flags[SUB_BLOCKS], draws[SUB_BLOCKS];
  __shared__ __align__(8) u64 barriers[SUB_BLOCKS * WARPS * STAGES];
  begin();
  Unit u;
  find_sub_block(u);
  char* shared = rings + u.sub_block * RINGS_BYTES;
  Prologue& prologue = prologues[u.sub_block];
  float (*ml)[HEADS][2] = all_ml[u.sub_block];
  Ring ring;
  ring.make(u, shared, barriers + u.sub_block * WARPS * STAGES, draws + u.sub_block);
  const UnitTokens tokens = find_tokens(at, u);
  Params params;
  params.load(at, u);
  QueryFours loaded;
  loaded.await_and_start<QUERY_FIRST, FIRST_BYTES>(at, u, ring, tokens);
  Query q;
  q.fold(at, u, params, loaded, prologue);
#if TAU
  score_range(ring, u, q, ml, prologue.heads);
  if (at.blocks * at.splits > 1) agree_on_range(at, u, prologue.heads);
  ring.reset(u);
  sync_sub_block(u);
  calibrate(at, u, q, prologue.heads);
#endif
  Sums sums;
  sums.clear(q, ml[u.warp]);
  // V of the tile before: its probabilities arrive while this tile's scores are computed. In the
  // first round something that nobody writes any more, times 0.
  u32 before = ring.upcoming() + TILES * K_BYTES;
  bool any = false;
  while (ring.current < u.last) {
    int next;
    const u32 here = ring.take_current();
    const int left = u.length - ring.current * KEYS;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      float f[HT][8];
      u32 pi[HT][8], v[VWORDS];
      load_words<VWORDS>(v, before, u.lane);
      if (tile == 0) {
        if (STAGES == IN_FLIGHT + 1) __syncwarp();  // nobody needs the packed tile before any more
        next = ring.refill<PACKED_TILE_BYTES, 0>(u);
      }
      q.dot(f, here + tile * K_BYTES, u.lane);
      before = here + TILES * K_BYTES + tile * V_BYTES;
      if (left < KEYS) hide_after(f, left - tile * TILE, u.g, MINUS_INFINITY);
      u32 over = sums.exponentials(f, q, pi, 0);
      // Nothing yet in the first tile, where p is 0.
      sums.add(v);
      // One tile of heads after the other: fewer registers.
#pragma unroll
      for (int h = 0; h < HT; h++) {
        if (h > 0) over = sums.exponentials(f, q, pi, h);
        if (__any_sync(FULL, (over & ~0x4B00FFFFu) != 0)) sums.raise(f, q, pi, h);
        sums.to_operand(pi, h);
      }
    }
    any = true;
    ring.advance(next);
  }
  if (any) {
    u32 v[VWORDS];
    load_words<VWORDS>(v, before, u.lane);
    sums.add(v);
    sums.separate();
  }

  ring.leave();
  sums.store(u, sums_of(shared, u.warp), ml[u.warp]);
  finish(at, u, shared, ml, flags + u.sub_block, P_TOP, [&](int c, float l, float sum) {
    return sum * prologue.v_scale[c] + l * prologue.v_zero[c];
  });
}
