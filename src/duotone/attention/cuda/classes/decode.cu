// Decode attention on packed K and V whose channels have unequal bits: duotone's own presets.
//
// Codes are sorted by class, and q is gathered in K's coded channels, times their scales, as
// integers of two digits. Where K has groups, its classes change from tile to tile, and so do q's
// integers. Zero-points of all channels then meet q in fp16 products, q as a sum of two fp16
// numbers. Else all of that belongs to the whole span, as V's classes always do.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V; D: padded to a multiple of 32 in the zero-points
//   K_TILES   1: K's parameters lie in its tiles; 0: they belong to spans, as V's do
//   KN4, KN2, KN1, VN4, VN2, VN1  channels of K and of V with codes of 4, 2 and 1 bits
//   K_SMALL, V_SMALL  1: scales and zero-points of K, of V, have 8 bits; 0: they are fp16
//   SLOT_BYTES  see shared/ring.cuh
//   G, WARPS, SUB_BLOCKS, PER_SM, STAGES, TILES, QUERY, OUT, OVERLAP, ARGUMENTS_BYTES
//                         as in spans/decode.cu
#define D ((CHANNELS + 31) / 32 * 32)
#define HT ((G + 3) / 4)  // tiles of 4 q heads: 8 columns of B, a high and a low digit each
#define HEADS (HT * 4)
#define TILE 64
#define KEYS (TILES * TILE)
#define IN_FLIGHT 1
#define COLUMNS_OF(N) (((N) + 15) / 16)
#define HALF_OF(N) ((N) % 16 > 0 && (N) % 16 <= 8)  // whether the last column is a half one
#define WORDS_OF(N4, N2, N1) \
  (4 * COLUMNS_OF(N4) - 2 * HALF_OF(N4) + 2 * COLUMNS_OF(N2) - HALF_OF(N2) + COLUMNS_OF(N1))
#define CODE_SLOTS (16 * (COLUMNS_OF(KN4) + COLUMNS_OF(KN2) + COLUMNS_OF(KN1)))
// Where the parts of a tile begin; after the codes, what K has in its tiles.
#define VALUES_AT (128 * WORDS_OF(KN4, KN2, KN1))
#define ZEROS_AT (VALUES_AT + 128 * WORDS_OF(VN4, VN2, VN1))
#define PARAMETER_BYTES (K_SMALL ? 1 : 2)
#define SCALES_AT (ZEROS_AT + PARAMETER_BYTES * D)
#define CHANNELS_AT (SCALES_AT + PARAMETER_BYTES * CODE_SLOTS)
#define EXPONENTS_AT (CHANNELS_AT + CODE_SLOTS)
#define TILE_BYTES (K_TILES ? EXPONENTS_AT + 16 * K_SMALL : ZEROS_AT)
#define PACKED_TILE_BYTES (TILES * TILE_BYTES)
static_assert(STAGES > 2, "V of a tile is read while the next packed tile arrives");

#define BIAS 12582912.f  // 1.5 * 2^23: an integer below 2^22 added to its bits is a float
#define BIAS_BITS 0x4B400000
#define BOTH_BIASES 12632064.f  // BIAS * 257 / 256: of a high digit's sum and of a low one's
#define P_BIAS 8388608.f        // 2^23: p added to it has its integer in the low bits
#define Q_TOP 32639.f           // 127 * 256 + 127
#define PLAIN_TOP 16.f          // the largest q in fp16
#define P_TOP 15.999f
#define LIFT 3.f  // how far below 2^16 a new maximum enters
#include "shared/common.cuh"
#include "shared/small_floats.cuh"
#include "classes/codes.cuh"
static_assert(VALUES_AT == 128 * Keys::WORDS, "the parts of a tile differ");
static_assert(ZEROS_AT == VALUES_AT + 128 * Values::WORDS, "the parts of a tile differ");

struct Arguments : Call {
  // With K_TILES K's largest scale by channel, of each kv head and span. Then parameters sorted by
  // class, and the channel of each of them; K's are null with K_TILES.
  const u16* k_top;
  const void *v_scale, *v_zero;  // fp16, or rows of 8 bits
  const unsigned char* v_order;
  const void *k_scale, *k_zero;
  const unsigned char* k_order;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

#include "shared/query_fours.cuh"
#include "classes/query.cuh"
#if K_TILES
#include "classes/query_of_tiles.cuh"
#else
#include "classes/query_of_spans.cuh"
#endif
#include "classes/prologue.cuh"
#include "classes/sums.cuh"

extern "C" __global__ void __launch_bounds__(SUB_BLOCKS * WARPS * 32, PER_SM)
    class_decode(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(128) char rings[];
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
  ValueParameters values;
  values.load(at, u);
  KeyParameters keys;
  if (u.warp < HEADS) keys.load(at, u);  // other warps have no head to fold
  QueryFours loaded;
  // Where K is a span's, packed tiles that arrive during the previous kernel gain more than an
  // early q.
  loaded.await_and_start<K_TILES, PACKED_TILE_BYTES>(at, u, ring, tokens);
  prologue.put_values(u, values);
  prologue.fold_query(at, u, keys, loaded);
  sync_sub_block(u);
  Query q;
  q.make(at, u, prologue.table, prologue.heads, prologue.bias);
  Sums sums;
  sums.clear(prologue);
  // V of the tile before: its probabilities arrive while this tile's scores are computed. In the
  // first round something that nobody writes any more, times 0.
  u32 before = ring.upcoming() + VALUES_AT;
  bool any = false;
  while (ring.current < u.last) {
    int next;
    const u32 here = ring.take<PACKED_TILE_BYTES, 0>(u, next);
    const int left = u.length - ring.current * KEYS;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const u32 start = here + tile * TILE_BYTES;
      float f[HT][8];
      u32 pi[HT][8], v[Values::WORDS], over = 0;
      q.fold(start, u);
      q.dot(f, start, u.lane);
      load_words<Values::WORDS>(v, before, u.lane);
      before = start + VALUES_AT;
      if (left < KEYS) hide_after(f, left - tile * TILE, u.g);
#pragma unroll
      for (int h = 0; h < HT; h++) over |= sums.exponentials(f, q, pi, h);
      sums.add(v);  // nothing yet in the first tile: p is 0
      if (__any_sync(FULL, (over & ~0x4B00FFFFu) != 0)) sums.raise(f, q, pi);
      sums.to_operand(pi);
    }
    any = true;
    ring.advance(next);
  }
  if (any) {
    u32 v[Values::WORDS];
    load_words<Values::WORDS>(v, before, u.lane);
    sums.add(v);
  }

  ring.leave();
  sums.store(u, sums_of(shared, u.warp), ml[u.warp], prologue);
  finish(at, u, shared, ml, flags + u.sub_block, P_TOP, [&](int c, float l, float sum) {
    float scale_zero[2];
    prologue.value_numbers(scale_zero, c);
    return sum * scale_zero[0] + l * scale_zero[1];
  });
}
