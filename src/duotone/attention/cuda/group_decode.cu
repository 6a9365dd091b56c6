// Decode attention on packed K and V with a scale for every 32 or more elements (KIVI, InnerQ).
//
// Codes become fp16 numbers in registers and go through fp16 products. K and V are the same to this
// kernel: a matrix of `rows` by `k`, of which k is summed over. K: rows are tokens, k are channels; V:
// rows are channels, k are tokens. A scale belongs to a run of rows (KIVI) or of k (InnerQ).
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V; D: padded to a multiple of 32 in the codes
//   KB, VB    bits per code (1, 2, 4)
//   K_ALONG_K, V_ALONG_K  1: a scale for a run along k (inner grouping), 0: along rows
//   K_GROUP, V_GROUP      elements per scale
//   K_SIGNS, V_SIGNS      1: groups of 32 along k have a sign word or a zero-point
//   G, WARPS, TEAMS, STAGES, TILES, QUERY, ARGUMENTS_BYTES  as in span_decode.cu
#define D ((CHANNELS + 31) / 32 * 32)
#define HT ((G + 7) / 8) // tiles of 8 q heads: the columns of B
#define HEADS (HT * 8)
#define TILE 32
#define KEYS (TILES * TILE)
#define KC (D / 16) // chunks of 16 channels
#define CODE_BYTES(BITS) (TILE * D * (BITS) / 8)
// Scales and zero-points of a tile: 4 bytes a group, or 6 with a sign word.
#define K_GROUPS (K_ALONG_K ? TILE * (D / K_GROUP) : D)
#define V_GROUPS (V_ALONG_K ? D : TILE * (D / V_GROUP))
#define K_PARAM_BYTES (K_GROUPS * (K_SIGNS ? 6 : 4))
#define V_PARAM_BYTES (V_GROUPS * (V_SIGNS ? 6 : 4))
#define TILE_BYTES (CODE_BYTES(KB) + CODE_BYTES(VB) + K_PARAM_BYTES + V_PARAM_BYTES)
#define RECORD_BYTES (TILES * TILE_BYTES)
#include "common.cuh"

// Numbers are 2^-8 of themselves in fp16 products: a code below the top of a mantissa whose exponent is
// 0 is code * 2^-(14 + bits) exactly, and scale * 2^(6 + bits) makes it scale * code * 2^-8. Nothing is
// rounded but the sum with the zero-point. Scales must be below 2^(10 - bits), which the layout checks.
#define UNIT 256.f
#define TOP_WEIGHT 16384.f
#define LIFT 6.f // how far above 1 the largest weight enters

struct Arguments : Call {};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0,%1,%2,%3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ u32 mul2(u32 a, u32 b) {
  u32 d;
  asm("mul.rn.f16x2 %0,%1,%2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ void mma(float* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// 2^e twice.
#define TWO_TO(E) ((u32)((15 + (E)) << 10) * 0x00010001u)

// What makes numbers of two codes: x * step + start.
struct Levels {
  u32 step, start;
  template <int BITS> __device__ __forceinline__ void set(u32 scale, u32 zero) {
    step = mul2(scale, TWO_TO(6 + BITS));
    start = mul2(zero, TWO_TO(-8));
  }
};

// Where a code goes in each half of a register.
template <int BITS> struct Mask {
  static constexpr int FIRST = 10 - BITS;
  static constexpr u32 VALUE = (((1u << BITS) - 1) << FIRST) * 0x00010001u;
};

// One operand: ROWS tiles of 16 rows by CHUNKS of 16 k.
template <int ROWS, int CHUNKS, int BITS, int ALONG_K, int GROUP, int SIGNS> struct Operand {
  static constexpr int PER_HALF = 16 / BITS, WORDS = ROWS * CHUNKS * 4 / PER_HALF;
  // Groups along k per row, and chunks that share one.
  static constexpr int K_GROUPS_PER_ROW = GROUP >= CHUNKS * 16 ? 1 : CHUNKS * 16 / GROUP;
  static constexpr int CHUNKS_PER_GROUP = CHUNKS / K_GROUPS_PER_ROW;
  static constexpr int ROW_TILES_PER_GROUP = GROUP / 16 < ROWS ? GROUP / 16 : ROWS;
  u32 words[WORDS], mask;

  __device__ __forceinline__ void load(u32 codes, int lane, const u32* constants) {
    load_words<WORDS>(words, codes, lane);
    mask = constants[BITS == 1 ? 0 : BITS == 2 ? 1 : 2];
  }

  // Two codes at the top of two mantissas.
  template <int E> __device__ __forceinline__ u32 raw() const {
    constexpr int shift = E % PER_HALF * BITS - Mask<BITS>::FIRST;
    const u32 word = words[E / PER_HALF];
    return (shift > 0 ? word >> (shift > 0 ? shift : 0) : word << (shift > 0 ? 0 : -shift)) & mask;
  }
  // Scale per run of rows: [row group][chunk][t]{scale k, scale k + 8, zero k, zero k + 8}, pairs of k.
  static __device__ __forceinline__ void load_by_rows(Levels* l, u32 params, int group, int chunk, int t) {
    u32 x[4];
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(params + ((group * CHUNKS + chunk) * 4 + t) * 16));
    l[0].template set<BITS>(x[0], x[2]);
    l[1].template set<BITS>(x[1], x[3]);
  }
  // Scale per run of k: [row tile][group][g]{scale g, scale g + 8}{zero g, zero g + 8}; with signs
  // {scale g, scale g + 8} and then [..][g]{word g, word g + 8}, where a scale below 0 says signs.
  static __device__ __forceinline__ void load_along_k(Levels* l, u32* signs, u32 params, int tile, int group, int g, int t) {
    const int at = (tile * K_GROUPS_PER_ROW + group) * 8 + g;
    u32 scale, zero;
    if (SIGNS) {
      u32 word[2];
      asm volatile("ld.shared.u32 %0,[%1];" : "=r"(scale) : "r"(params + at * 4));
      asm volatile("ld.shared.v2.u32 {%0,%1},[%2];"
                   : "=r"(word[0]), "=r"(word[1])
                   : "r"(params + ROWS * K_GROUPS_PER_ROW * 32 + at * 8));
      u32 low, high; // all ones where the scale of row g, of row g + 8, has its sign bit
      asm("prmt.b32 %0,%1,0,0x9999;" : "=r"(low) : "r"(scale));
      asm("prmt.b32 %0,%1,0,0xBBBB;" : "=r"(high) : "r"(scale));
      signs[0] = (word[0] & low) << t, signs[1] = (word[1] & high) << t;
      zero = __byte_perm(word[0] & ~low, word[1] & ~high, 0x5410);
      scale &= 0x7FFF7FFFu;
    } else
      asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(scale), "=r"(zero) : "r"(params + at * 8));
    Levels both = {};
    both.template set<BITS>(scale, zero);
    l[0].step = __byte_perm(both.step, 0, 0x1010), l[1].step = __byte_perm(both.step, 0, 0x3232);
    l[0].start = __byte_perm(both.start, 0, 0x1010), l[1].start = __byte_perm(both.start, 0, 0x3232);
  }
  // The A operand of one row tile and chunk. row: levels of rows g, g + 8; pair: of k, k + 8.
  template <int TILE_AT, int CHUNK> __device__ __forceinline__ void fragment(u32* a, const Levels* l, const u32* signs) const {
    constexpr int E = (TILE_AT * CHUNKS + CHUNK) * 4;
    const u32 x[4] = {raw<E>(), raw<E + 1>(), raw<E + 2>(), raw<E + 3>()};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Levels& mine = l[ALONG_K ? i & 1 : i >> 1];
      a[i] = fma2(x[i], mine.step, mine.start);
      if (SIGNS) { // a ^ (moved & sign bits)
        const u32 moved = signs[i & 1] << (CHUNK % 2 * 8 + i / 2 * 4);
        asm("lop3.b32 %0,%1,0x80008000,%2,0x6A;" : "=r"(a[i]) : "r"(moved), "r"(a[i]));
      }
    }
  }
  // c[tile][h] += A * b[chunk][h]. The order of loops keeps the scales in use few.
  __device__ __forceinline__ void multiply(float (*c)[HT][4], const u32 (*b)[HT][2], u32 params, int g, int t) const {
    if constexpr (ALONG_K) along_k<0>(c, b, params, g, t);
    else by_rows<0, 0>(c, b, params, g, t);
  }
  template <int TILE_AT> __device__ __forceinline__ void along_k(float (*c)[HT][4], const u32 (*b)[HT][2], u32 params, int g, int t) const {
    chunks_of<TILE_AT, 0>(c, b, params, g, t);
    if constexpr (TILE_AT + 1 < ROWS) along_k<TILE_AT + 1>(c, b, params, g, t);
  }
  template <int TILE_AT, int GROUP_AT> __device__ __forceinline__ void chunks_of(float (*c)[HT][4], const u32 (*b)[HT][2], u32 params, int g, int t) const {
    Levels l[2];
    u32 signs[2];
    load_along_k(l, signs, params, TILE_AT, GROUP_AT, g, t);
    run<TILE_AT, GROUP_AT * CHUNKS_PER_GROUP, CHUNKS_PER_GROUP>(c, b, l, signs);
    if constexpr (GROUP_AT + 1 < K_GROUPS_PER_ROW) chunks_of<TILE_AT, GROUP_AT + 1>(c, b, params, g, t);
  }
  template <int TILE_AT, int CHUNK, int LEFT> __device__ __forceinline__ void run(float (*c)[HT][4], const u32 (*b)[HT][2], const Levels* l, const u32* signs) const {
    u32 a[4];
    fragment<TILE_AT, CHUNK>(a, l, signs);
#pragma unroll
    for (int h = 0; h < HT; h++) mma(c[TILE_AT][h], a, b[CHUNK][h]);
    if constexpr (LEFT > 1) run<TILE_AT, CHUNK + 1, LEFT - 1>(c, b, l, signs);
  }
  template <int GROUP_AT, int CHUNK> __device__ __forceinline__ void by_rows(float (*c)[HT][4], const u32 (*b)[HT][2], u32 params, int g, int t) const {
    Levels l[2];
    load_by_rows(l, params, GROUP_AT, CHUNK, t);
    down<GROUP_AT * ROW_TILES_PER_GROUP, CHUNK, ROW_TILES_PER_GROUP>(c, b, l);
    if constexpr (CHUNK + 1 < CHUNKS) by_rows<GROUP_AT, CHUNK + 1>(c, b, params, g, t);
    else if constexpr ((GROUP_AT + 1) * ROW_TILES_PER_GROUP < ROWS) by_rows<GROUP_AT + 1, 0>(c, b, params, g, t);
  }
  template <int TILE_AT, int CHUNK, int LEFT> __device__ __forceinline__ void down(float (*c)[HT][4], const u32 (*b)[HT][2], const Levels* l) const {
    u32 a[4];
    fragment<TILE_AT, CHUNK>(a, l, nullptr);
#pragma unroll
    for (int h = 0; h < HT; h++) mma(c[TILE_AT][h], a, b[CHUNK][h]);
    if constexpr (LEFT > 1) down<TILE_AT + 1, CHUNK, LEFT - 1>(c, b, l);
  }
};
typedef Operand<2, KC, KB, K_ALONG_K, K_GROUP, K_SIGNS> Keys;
typedef Operand<KC, 2, VB, V_ALONG_K, V_GROUP, V_SIGNS> Values;

// q as the B operand, scaled to fp16, and what undoes it for q heads 8 h + 2 t and 8 h + 2 t + 1.
struct Query {
  u32 b[KC][HT][2];
  float scale[HT][2];

  __device__ __forceinline__ void load(const Call& at, const Unit& u) {
    wait_for_previous();
#pragma unroll
    for (int h = 0; h < HT; h++) {
      const int mine = h * 8 + u.g;
      const query_t* query = at.query + ((size_t)u.head * G + mine) * CHANNELS;
      float x[KC][4], top = 1e-20f;
#pragma unroll
      for (int k = 0; k < KC; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int c = 16 * k + 2 * u.t + (i & 1) + (i >> 1) * 8;
          x[k][i] = mine < G && c < CHANNELS ? query_to_float(query[c]) : 0.f;
          top = fmaxf(top, fabsf(x[k][i]));
        }
      top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
      top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
      const float unit = 16.f / top;
#pragma unroll
      for (int k = 0; k < KC; k++) b[k][h][0] = pack2(x[k][0] * unit, x[k][1] * unit), b[k][h][1] = pack2(x[k][2] * unit, x[k][3] * unit);
#pragma unroll
      for (int i = 0; i < 2; i++) scale[h][i] = __shfl_sync(FULL, top, (2 * u.t + i) * 4) * at.sm_scale * (UNIT / 16.f);
    }
  }
};

// softmax(q K^T) V of a unit in fp32, weights in fp16 under a maximum that is raised when it has to be.
struct Sums {
  float acc[KC][HT][4], weight[HT][2], top[HT][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < HT; h++) {
#pragma unroll
      for (int m = 0; m < KC; m++) acc[m][h][0] = acc[m][h][1] = acc[m][h][2] = acc[m][h][3] = 0.f;
      weight[h][0] = weight[h][1] = 0.f;
      top[h][0] = top[h][1] = -1e30f;
    }
  }
  // s: scores (log2 units) of 32 tokens, [row tile][h]; raises what overflows, returns weights in s.
  __device__ __forceinline__ void weigh(float (*s)[HT][4]) {
    float over = 0.f;
    float p[2][HT][4];
    exponentials(p, s, over);
    if (__any_sync(FULL, !(over < TOP_WEIGHT))) {
      raise(s);
      exponentials(p, s, over);
    }
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) weight[h][i & 1] += p[r][h][i], s[r][h][i] = p[r][h][i];
  }
  __device__ __forceinline__ void exponentials(float (*p)[HT][4], const float (*s)[HT][4], float& over) const {
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          p[r][h][i] = exp2_fast(s[r][h][i] - top[h][i & 1]);
          over = fmaxf(over, p[r][h][i]);
        }
  }
  __device__ __forceinline__ void raise(const float (*s)[HT][4]) {
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float a = fmaxf(fmaxf(s[0][h][i], s[0][h][i + 2]), fmaxf(s[1][h][i], s[1][h][i + 2]));
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) a = fmaxf(a, __shfl_xor_sync(FULL, a, o));
        const float raised = fmaxf(top[h][i], a - LIFT), by = exp2_fast(top[h][i] - raised);
        top[h][i] = raised;
        weight[h][i] *= by;
#pragma unroll
        for (int m = 0; m < KC; m++) acc[m][h][i] *= by, acc[m][h][i + 2] *= by;
      }
  }
  __device__ __forceinline__ void store(const Unit& u, float* rows, float (*ml)[2]) {
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float* row = rows + (h * 8 + 2 * u.t + i) * (D + 8) + u.g;
#pragma unroll
        for (int m = 0; m < KC; m++) row[16 * m] = acc[m][h][i], row[16 * m + 8] = acc[m][h][i + 2];
        float l = weight[h][i];
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) l += __shfl_xor_sync(FULL, l, o);
        if (u.g == 0) ml[h * 8 + 2 * u.t + i][0] = top[h][i], ml[h * 8 + 2 * u.t + i][1] = l;
      }
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) group_decode(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ float ml[WARPS][HEADS][2], whole[TEAMS][HEADS][2];
  __shared__ int flags[TEAMS], drawn[TEAMS];
  __shared__ __align__(8) u64 barriers[WARPS * STAGES];
  __shared__ __align__(16) u32 kept[4];
  let_next_begin();
  Unit u;
  if (!find_unit(at, u)) return;
  Ring ring;
  ring.make(u, shared, barriers, drawn + u.team);
  ring.start<RECORD_BYTES>(u);
  ring.reset(u);
  if (u.lane == 0) kept[0] = Mask<1>::VALUE, kept[1] = Mask<2>::VALUE, kept[2] = kept[3] = Mask<4>::VALUE;
  Query q;
  q.load(at, u);
  TEAM_SYNC(u);
  u32 constants[4]; // loaded, so that the compiler keeps them instead of making them anew
  asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(constants[0]), "=r"(constants[1]), "=r"(constants[2]), "=r"(constants[3])
               : "r"(shared_address(kept)));
  Sums sums;
  sums.clear();
  while (ring.current < u.last) {
    int next;
    const u32 here = ring.take<RECORD_BYTES>(u, next);
    const int left = u.length - ring.current * KEYS;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      const u32 k_codes = here + tile * TILE_BYTES, v_codes = k_codes + CODE_BYTES(KB);
      const u32 k_params = v_codes + CODE_BYTES(VB), v_params = k_params + K_PARAM_BYTES;
      float s[2][HT][4];
#pragma unroll
      for (int h = 0; h < HT; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[0][h][i] = s[1][h][i] = 0.f;
      {
        Keys keys;
        keys.load(k_codes, u.lane, constants);
        keys.multiply(s, q.b, k_params, u.g, u.t);
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
      Values values;
      values.load(v_codes, u.lane, constants);
      values.multiply(sums.acc, p, v_params, u.g, u.t);
    }
    ring.current = __shfl_sync(FULL, next, 0);
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // the ring is free now
  sums.store(u, sums_of(u, shared, u.warp), ml[u.team * WT + u.warp]);
  finish(at, u, shared, ml, whole[u.team], flags + u.team, 0.f, [](int, float, float sum) { return sum * UNIT; });
}
