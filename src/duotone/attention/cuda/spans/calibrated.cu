// Decode attention on span packed tiles with score calibration: K is read once, its scores are
// kept.
//
// A unit's scores must fit shared memory after the rings:
//     | rings of half packed tiles, K's and then V's | q, V's scales; then scores |
//
// Compiled by NVRTC with the macros of spans/decode.cu (CHANNELS, KB, VB, SMALL_PARAMETERS, TILES,
// G, WARPS, PER_SM, STAGES, QUERY, OUT, OVERLAP, PAGED, MERGE, ARGUMENTS_BYTES), and
//   CLUSTER  blocks of a cluster, which are the parts of a kv head. Where it is not defined, all
//            blocks of a head must be resident together
#define KEPT_SCORES
#define SLOT_BYTES (TILES * (K_BYTES > V_BYTES ? K_BYTES : V_BYTES))
#include "spans/shapes.cuh"
#include "spans/query.cuh"
#include "spans/range.cuh"
#include "spans/sums.cuh"
#include "spans/kept_scores.cuh"

// V's channels of a thread.
#define OF_A_THREAD ((CHANNELS + WARPS * 32 - 1) / (WARPS * 32))

// The softmax's weights of a tile of kept scores.
__device__ __forceinline__ void weigh(u32 (*pi)[8], const Sums& sums, const Query& q,
                                      const KeptScores& kept, const Unit& u, int packed_tile,
                                      int tile) {
  float f[HT][8];
  kept.take(f, (packed_tile - u.first) * TILES + tile);
  const int left = u.length - packed_tile * KEYS;
  if (left < KEYS) hide_after(f, left - tile * TILE, u.g, MINUS_INFINITY);
#pragma unroll
  for (int h = 0; h < HT; h++) sums.exponentials(f, q, pi, h);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_SM)
    span_calibrated(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ float ml[WARPS][HEADS][2], highest[HEADS];
  __shared__ __align__(8) float bounds[HEADS][2];
#ifdef CLUSTER
  __shared__ float agreed[HEADS][2];
#endif
  __shared__ int flag, drawn;
  __shared__ __align__(8) u64 barriers[WARPS * STAGES];
  char* after_rings = shared + WARPS * STAGES * SLOT_BYTES;
  Prologue& prologue = *(Prologue*)after_rings;
  begin();
  Unit u;
  find_sub_block(u);
  Ring ring;
  ring.make(u, shared, barriers, &drawn);
  const UnitTokens tokens = find_tokens(at, u);
  Params params;
  params.load(at, u);
  QueryFours loaded;
  loaded.await_and_start<false, TILES * K_BYTES>(at, u, ring, tokens);
  Query q;
  q.fold(at, u, params, loaded, prologue);
  KeptScores kept;
  kept.set(prologue, u, after_rings);
  float v_scale[OF_A_THREAD], v_zero[OF_A_THREAD];
#pragma unroll
  for (int i = 0; i < OF_A_THREAD; i++) {
    const int c = min(u.tid + i * WARPS * 32, CHANNELS - 1);
    v_scale[i] = prologue.v_scale[c], v_zero[i] = prologue.v_zero[c];
  }
  __syncthreads();  // scores overwrite the prologue
  keep_scores(ring, u, q, kept, ml, bounds);
  if (u.tid < HEADS) highest[u.tid] = bounds[u.tid][1];  // this unit's
#ifdef CLUSTER
  agree_in_cluster(u, bounds, agreed);
  const float (*range)[2] = agreed;
#else
  if (at.blocks * at.splits > 1) agree_on_range(at, u, bounds);
  const float (*range)[2] = bounds;
#endif
  ring.reset(u);
  __syncthreads();
  float most[HT];
#pragma unroll
  for (int h = 0; h < HT; h++) most[h] = (highest[h * 4 + u.t] - q.offset[h]) / q.scale[h];
  calibrate(at, u, q, range);

  Sums sums;
  sums.clear(q, ml[u.warp]);
  sums.fix(q, most);
  if (ring.current < u.last) {
    u32 pi[HT][8];
    weigh(pi, sums, q, kept, u, ring.current, 0);
    sums.to_operand(pi);
  }
  while (ring.current < u.last) {
    int next;
    const u32 here = ring.take<TILES * V_BYTES, TILES * K_BYTES>(u, next);
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      u32 pi[HT][8], v[VWORDS];
      load_words<VWORDS>(v, here + tile * V_BYTES, u.lane);
      // Weights of the next tile; after the last one they are made and not used.
      const bool ends = tile == TILES - 1;
      const int packed_tile = ends ? min(ring.following[0], u.last - 1) : ring.current;
      weigh(pi, sums, q, kept, u, packed_tile, ends ? 0 : tile + 1);
      sums.add(v);
      sums.to_operand(pi);
    }
    ring.advance(next);
  }
  sums.separate();

  ring.leave();
  sums.store(u, sums_of(shared, u.warp), ml[u.warp]);
#ifdef CLUSTER
  leave_cluster();
#endif
  __syncthreads();
#pragma unroll
  for (int i = 0; i < OF_A_THREAD; i++) {
    const int c = u.tid + i * WARPS * 32;
    if (c < CHANNELS) prologue.v_scale[c] = v_scale[i], prologue.v_zero[c] = v_zero[i];
  }
  finish(at, u, shared, ml, &flag, P_TOP, [&](int c, float l, float sum) {
    return sum * prologue.v_scale[c] + l * prologue.v_zero[c];
  });
}
