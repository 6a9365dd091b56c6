// Decode attention on packed K and V with a scale for every 32 or more elements (KIVI, InnerQ).
//
// Codes become fp16 numbers in registers and go through fp16 products. K and V are the same to this
// kernel: a matrix of `rows` by `k`, of which k is summed over. K: rows are tokens, k are channels;
// V: rows are channels, k are tokens. A scale belongs to a run of rows (KIVI) or of k (InnerQ).
// Along rows, codes become levels. Along k, sums of codes are scaled, and sums of q or of weights
// bring the zero-points in.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V; D: padded to a multiple of 32 in the codes
//   KB, VB    bits per code (1, 2, 4)
//   K_ALONG_K, V_ALONG_K  1: a scale for a run along k (inner grouping), 0: along rows
//   K_GROUP, V_GROUP      elements per scale
//   K_SIGNS, V_SIGNS      1: groups of 32 along k have signs or a zero-point
//   K_SEPARATE, V_SEPARATE  1: codes are stored separately (groups/separate.cuh)
//   TAIL                  type of the rows of tokens after the packed ones (groups/tail.cuh), 0:
//   none TAIL_PAGES            pages of a sequence that hold them SLOT_BYTES            see
//   shared/ring.cuh G, WARPS, PER_SM, STAGES, TILES, QUERY, OUT, OVERLAP, ARGUMENTS_BYTES  as in
//   spans/decode.cu
#define D ((CHANNELS + 31) / 32 * 32)
#define HT ((G + 7) / 8)  // tiles of 8 q heads: the columns of B
#define HEADS (HT * 8)
#define TILE 32
#define KEYS (TILES * TILE)
#define KC (D / 16)  // chunks of 16 channels
#define CODE_BYTES(BITS) (TILE * D * (BITS) / 8)
// Scales and zero-points of a tile: 4 bytes a group, or 6 with signs.
#define K_GROUPS (K_ALONG_K ? TILE * (D / K_GROUP) : D)
#define V_GROUPS (V_ALONG_K ? D : TILE * (D / V_GROUP))
#define K_PARAM_BYTES (K_GROUPS * (K_SIGNS ? 6 : 4))
#define V_PARAM_BYTES (V_GROUPS * (V_SIGNS ? 6 : 4))
// Codes that a tile has itself.
#define K_OWN_BYTES (K_SEPARATE ? 0 : CODE_BYTES(KB))
#define V_OWN_BYTES (V_SEPARATE ? 0 : CODE_BYTES(VB))
#define TILE_BYTES (K_OWN_BYTES + V_OWN_BYTES + K_PARAM_BYTES + V_PARAM_BYTES)
#define PACKED_TILE_BYTES (TILES * TILE_BYTES)
#define K_SEPARATE_BYTES (K_SEPARATE ? TILES * CODE_BYTES(KB) : 0)
#define V_SEPARATE_BYTES (V_SEPARATE ? TILES * CODE_BYTES(VB) : 0)
#define PIECES_BYTES (PACKED_TILE_BYTES + K_SEPARATE_BYTES + V_SEPARATE_BYTES)  // of a packed tile
#define ONE_RUN
#include "shared/common.cuh"

#define Q_TOP 32768.f
#define TOP_WEIGHT 16384.f
#define LIFT 6.f  // how far above 1 the largest weight enters

#include "groups/separate.cuh"
#include "groups/numbers.cuh"
#include "groups/along_k.cuh"
#include "groups/along_rows.cuh"
#if K_ALONG_K
typedef AlongK<2, KC, KB, K_GROUP, K_SIGNS> Keys;
#else
typedef AlongRows<2, KC, KB, K_GROUP> Keys;
#endif
#if V_ALONG_K
typedef AlongK<KC, 2, VB, V_GROUP, V_SIGNS> Values;
#else
typedef AlongRows<KC, 2, VB, V_GROUP> Values;
#endif

#include "groups/sums.cuh"
#if TAIL
#include "groups/tail.cuh"
#endif

extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_SM)
    group_decode(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ float ml[WARPS][HEADS][2];
  __shared__ int flag, drawn;
  __shared__ __align__(8) u64 barriers[WARPS * STAGES];
  begin();
  wait_for_query();  // lengths, too, may have changed
  GroupUnit u;
  u.find(at);
  Ring ring;
  ring.make(u, shared, barriers, &drawn);
  ring.start<PIECES_BYTES, 0>(u);
  ring.reset(u);
  Query q;
  q.load(at, u);
  __syncthreads();
  Sums sums;
  sums.clear();
#if TAIL
  // The first packed tiles are in flight meanwhile. The share of the last split is not the largest.
  if (u.part == at.splits - 1) {
    Tail tail;
    tail.find(at, u);
    tail.add(sums, q, u);
  }
#endif
  while (ring.current < u.last) {
    int next;
    const u32 here = ring.take<PIECES_BYTES, 0>(u, next);
    const int left = u.length - ring.current * KEYS;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const u32 own = here + tile * TILE_BYTES, separate = here + PACKED_TILE_BYTES;
      const u32 k_codes = K_SEPARATE ? separate + tile * CODE_BYTES(KB) : own;
      const u32 v_codes =
          V_SEPARATE ? separate + K_SEPARATE_BYTES + tile * CODE_BYTES(VB) : own + K_OWN_BYTES;
      const u32 k_params = own + K_OWN_BYTES + V_OWN_BYTES, v_params = k_params + K_PARAM_BYTES;
      float s[2][HT][4];
#pragma unroll
      for (int h = 0; h < HT; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[0][h][i] = s[1][h][i] = 0.f;
      {
        Keys keys;
        keys.load(k_codes, u.lane);
        keys.multiply(s, q.b, q.sums, k_params, u.g, u.t);
      }
#pragma unroll
      for (int h = 0; h < HT; h++)
#pragma unroll
        for (int r = 0; r < 2; r++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            const bool there = 16 * r + 8 * (i >> 1) + u.g < left - tile * TILE;
            s[r][h][i] = there ? s[r][h][i] * q.scale[h][i & 1] : MINUS_INFINITY;
          }
      sums.weigh(s);
      u32 p[2][HT][2];
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int h = 0; h < HT; h++) {
          p[r][h][0] = transpose8x8(pack2(s[r][h][0], s[r][h][1]));
          p[r][h][1] = transpose8x8(pack2(s[r][h][2], s[r][h][3]));
        }
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int h = 0; h < HT; h++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            p[r][h][half] = Values::divided(p[r][h][half], r, half);
      SumsInRegisters p_sums;
      Values::sum(&p_sums.sums, p);
      sums.count(p_sums);
      Values values;
      values.load(v_codes, u.lane);
      values.multiply(sums.acc, p, p_sums, v_params, u.g, u.t);
    }
    ring.advance(next);
  }
  ring.leave();
  sums.store(u, sums_of(shared, u.warp), ml[u.warp]);
  finish(at, u, shared, ml, &flag, 0.f, [](int, float, float sum) { return sum * Values::UNIT; });
}
