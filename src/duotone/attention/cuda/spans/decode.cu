// Decode attention on packed K and V whose scales belong to whole spans of tokens.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V; D: padded to a multiple of 32 in the codes
//   KB, VB  bits per code of K and of V (1, 2, 4, 8)
//   G       q heads per kv head
//   WARPS, PER_SM, STAGES, TILES, UNDER_WAY (see ring.cuh)
//   QUERY   type of q and of out: 0 float16, 1 bfloat16, 2 float32
//   TEAMS   of WARPS warps in a block; a unit each
//   TAU     1: score calibration; all blocks of a kv head must be resident together
//   ARGUMENTS_BYTES  what the host takes Arguments to be
#include "spans/shapes.cuh"
#include "spans/query.cuh"
#include "spans/range.cuh"
#include "spans/sums.cuh"

// Whether q is waited for ahead of the first records. Behind those its answer takes microseconds;
// but that they are asked for while the kernel ahead still runs gains more where a record is soon
// worked off, as with more bits.
#define QUERY_FIRST (KB == 1 && VB == 1)
#define FIRST_BYTES (TAU ? TILES * K_BYTES : RECORD_BYTES)
static_assert(TEAMS == 1 || !TAU, "calibration is agreed on by blocks");

extern "C" __global__ void __launch_bounds__(TEAMS * WARPS * 32, PER_SM)
    span_decode(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(1024) char rings[];
  __shared__ Prologue prologues[TEAMS];
  __shared__ float all_ml[TEAMS][WARPS][HEADS][2];
  __shared__ int flags[TEAMS], draws[TEAMS];
  __shared__ __align__(8) u64 barriers[TEAMS * WARPS * STAGES];
  begin();
  Unit u;
  find_team(u);
  char* shared = rings + u.team * RINGS_BYTES;
  Prologue& prologue = prologues[u.team];
  float (*ml)[HEADS][2] = all_ml[u.team];
  Ring ring;
  ring.make(u, shared, barriers + u.team * WARPS * STAGES, draws + u.team);
  const Place place = find_place(at, u);
  Params params;
  params.load(at, u);
  QueryFours asked;
  asked.await_beside<QUERY_FIRST, FIRST_BYTES>(at, u, ring, place);
  Query q;
  q.fold(at, u, params, asked, prologue);
#if TAU
  score_range(ring, u, q, ml, prologue.heads);
  if (at.blocks * at.splits > 1) agree_on_range(at, u, prologue.heads);
  ring.reset(u);
  sync_team(u);
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
        if (STAGES == UNDER_WAY + 1) __syncwarp();  // nobody needs the record before any more
        next = ring.refill<RECORD_BYTES, 0>(u);
      }
      q.dot(f, here + tile * K_BYTES, u.lane);
      before = here + TILES * K_BYTES + tile * V_BYTES;
      if (left < KEYS) hide_behind(f, left - tile * TILE, u.g, MINUS_INFINITY);
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
  finish(at, u, shared, ml, flags + u.team, P_TOP, [&](int c, float l, float sum) {
    return sum * prologue.v_scale[c] + l * prologue.v_zero[c];
  });
}
