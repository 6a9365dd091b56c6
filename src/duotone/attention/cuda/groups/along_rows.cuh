// K or V of a tile as the A operand where a scale belongs to a run of rows (KIVI). Codes become
// levels, rounded to fp16, before they enter products.

// Step and start of two codes x, whose numbers are x * step + start.
struct Levels {
  u32 step, start;
};

// One operand: ROWS tiles of 16 rows by CHUNKS of 16 k.
//
// Numbers are 2^-8 of themselves. A code below the top of a mantissa whose exponent is 0 is exactly
// code * 2^-(14 + bits). Its step, scale * 2^(6 + bits), makes it scale * code * 2^-8. Codes of
// even q stand two bits lower where that saves a shift, and their steps are 4 times as large.
//
// Steps of a wide tile are -scale instead, and its codes are multiplied by the missing power of
// two, which is exact. Nothing is rounded but the sum with the zero-point.
template <int ROWS, int CHUNKS, int BITS, int GROUP>
struct AlongRows {
  static constexpr int WORDS = ROWS * CHUNKS * BITS / 4, GROUPS = 1;
  static constexpr int ROW_TILES = GROUP / 16 < ROWS ? GROUP / 16 : ROWS;  // that share a scale
  static constexpr int FIRST = 10 - BITS, LOWER = BITS == 4 ? 0 : 2;       // where codes stand
  static constexpr float UNIT = 256.f;
  u32 words[WORDS];

  static __device__ __forceinline__ u32 divided(u32 b, int, int) { return b; }
  __device__ __forceinline__ void load(u32 codes, int lane) {
    load_words<WORDS>(words, codes, lane);
  }
  // Sums of B over k: what rows of ones would give.
  static __device__ __forceinline__ void sum(float2 (*ones)[HT], const u32 (*b)[HT][2]) {
    const u32 a[4] = {TWO_TO(-8), TWO_TO(-8), TWO_TO(-8), TWO_TO(-8)};
#pragma unroll
    for (int h = 0; h < HT; h++) {
      float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) mma(c, a, b[chunk][h]);
      ones[0][h] = make_float2(c[0], c[1]);
    }
  }
  // c[row tile][h] += A * b[chunk][h].
  template <class Sums>
  __device__ __forceinline__ void multiply(float (*c)[HT][4], const u32 (*b)[HT][2], const Sums&,
                                           u32 params, int, int t) const {
    if (is_wide(params))
      multiply_levels<true>(c, b, params, t);
    else
      multiply_levels<false>(c, b, params, t);
  }
  // All steps of a tile have the same sign. The vote says nothing new, but to the compiler that a
  // warp goes one way.
  static __device__ __forceinline__ bool is_wide(u32 params) {
    u32 first;
    asm volatile("ld.shared.u32 %0,[%1];" : "=r"(first) : "r"(params));
    return __any_sync(FULL, (int)first < 0);
  }
  // The order of loops keeps the scales in use few.
  template <bool WIDE>
  __device__ __forceinline__ void multiply_levels(float (*c)[HT][4], const u32 (*b)[HT][2],
                                                  u32 params, int t) const {
#pragma unroll
    for (int group = 0; group < ROWS / ROW_TILES; group++)
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        Levels levels[2];
        load_levels<WIDE>(levels, params, group, chunk, t);
#pragma unroll
        for (int tile = group * ROW_TILES; tile < (group + 1) * ROW_TILES; tile++) {
          u32 a[4];
          fragment<WIDE>(a, levels, tile, chunk);
#pragma unroll
          for (int h = 0; h < HT; h++) mma(c[tile][h], a, b[chunk][h]);
        }
      }
  }
  // [row group][chunk][t]{step k, step k + 8, zero k, zero k + 8}, pairs of k.
  template <bool WIDE>
  static __device__ __forceinline__ void load_levels(Levels* levels, u32 params, int group,
                                                     int chunk, int t) {
    const u32 from = params + ((group * CHUNKS + chunk) * 4 + t) * 16;
    u32 zero[2];
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(levels[0].step), "=r"(levels[1].step), "=r"(zero[0]), "=r"(zero[1])
                 : "r"(from));
    if (WIDE) levels[0].step &= 0x7FFF7FFF, levels[1].step &= 0x7FFF7FFF;
    levels[0].start = mul2(zero[0], TWO_TO(-8)), levels[1].start = mul2(zero[1], TWO_TO(-8));
  }
  // The A operand of one row tile and chunk.
  template <bool WIDE>
  __device__ __forceinline__ void fragment(u32* a, const Levels* levels, int tile,
                                           int chunk) const {
    const int run = (tile * CHUNKS + chunk) / 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Levels& mine = levels[i >> 1];
      const int q = 2 * (chunk & 1) + (i >> 1);
      const u32 x = raw(run, i & 1, q);
      a[i] = fma2(WIDE ? mul2(x, lift_of(q)) : x, mine.step, mine.start);
    }
  }
  // Factor from a code where it stands to 2^-8 code.
  static __device__ __forceinline__ constexpr u32 lift_of(int q) {
    return TWO_TO(6 + BITS + (q & 1 ? 0 : LOWER));
  }
  // Two codes at the top of two mantissas, or LOWER. One shift serves an even q and the next.
  __device__ __forceinline__ u32 raw(int run, int row_half, int q) const {
    constexpr u32 MASK = (((1u << BITS) - 1) << FIRST) * 0x00010001u;
    const u32 word = words[BITS == 4 ? 2 * run + row_half : BITS == 2 ? run : run / 2];
    const int top_q = LOWER ? q | 1 : q;
    const int bit = BITS == 4 ? 4 * top_q : 8 * row_half + 2 * top_q + (BITS == 1 ? run % 2 : 0);
    const u32 moved = bit > FIRST ? word >> (bit > FIRST ? bit - FIRST : 0)
                                  : word << (bit > FIRST ? 0 : FIRST - bit);
    return moved & MASK >> (q & 1 ? 0 : LOWER);
  }
};
