// K or V of a tile as the A operand of fp16 products: codes, scales and signs from shared memory.
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
  template <int BITS>
  __device__ __forceinline__ void set(u32 scale, u32 zero) {
    step = mul2(scale, TWO_TO(6 + BITS));
    start = mul2(zero, TWO_TO(-8));
  }
};

// Where a code goes in each half of a register.
template <int BITS>
struct Mask {
  static constexpr int FIRST = 10 - BITS;
  static constexpr u32 VALUE = (((1u << BITS) - 1) << FIRST) * 0x00010001u;
};

// One operand: ROWS tiles of 16 rows by CHUNKS of 16 k.
template <int ROWS, int CHUNKS, int BITS, int ALONG_K, int GROUP, int SIGNS>
struct Operand {
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
  template <int E>
  __device__ __forceinline__ u32 raw() const {
    constexpr int shift = E % PER_HALF * BITS - Mask<BITS>::FIRST;
    const u32 word = words[E / PER_HALF];
    return (shift > 0 ? word >> (shift > 0 ? shift : 0) : word << (shift > 0 ? 0 : -shift)) & mask;
  }
  // Scale per run of rows: [row group][chunk][t]{scale k, scale k + 8, zero k, zero k + 8}, pairs
  // of k.
  static __device__ __forceinline__ void load_by_rows(Levels* l, u32 params, int group, int chunk,
                                                      int t) {
    u32 x[4];
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(params + ((group * CHUNKS + chunk) * 4 + t) * 16));
    l[0].template set<BITS>(x[0], x[2]);
    l[1].template set<BITS>(x[1], x[3]);
  }
  // Scale per run of k: [row tile][group][g]{scale g, scale g + 8}{zero g, zero g + 8}; with signs
  // {scale g, scale g + 8} and then [..][g]{word g, word g + 8}, where a scale below 0 says signs.
  static __device__ __forceinline__ void load_along_k(Levels* l, u32* signs, u32 params, int tile,
                                                      int group, int g, int t) {
    const int at = (tile * K_GROUPS_PER_ROW + group) * 8 + g;
    u32 scale, zero;
    if (SIGNS) {
      u32 word[2];
      asm volatile("ld.shared.u32 %0,[%1];" : "=r"(scale) : "r"(params + at * 4));
      asm volatile("ld.shared.v2.u32 {%0,%1},[%2];"
                   : "=r"(word[0]), "=r"(word[1])
                   : "r"(params + ROWS * K_GROUPS_PER_ROW * 32 + at * 8));
      u32 low, high;  // all ones where the scale of row g, of row g + 8, has its sign bit
      asm("prmt.b32 %0,%1,0,0x9999;" : "=r"(low) : "r"(scale));
      asm("prmt.b32 %0,%1,0,0xBBBB;" : "=r"(high) : "r"(scale));
      signs[0] = (word[0] & low) << t, signs[1] = (word[1] & high) << t;
      zero = __byte_perm(word[0] & ~low, word[1] & ~high, 0x5410);
      scale &= 0x7FFF7FFFu;
    } else
      asm volatile("ld.shared.v2.u32 {%0,%1},[%2];"
                   : "=r"(scale), "=r"(zero)
                   : "r"(params + at * 8));
    Levels both = {};
    both.template set<BITS>(scale, zero);
    l[0].step = __byte_perm(both.step, 0, 0x1010), l[1].step = __byte_perm(both.step, 0, 0x3232);
    l[0].start = __byte_perm(both.start, 0, 0x1010),
    l[1].start = __byte_perm(both.start, 0, 0x3232);
  }
  // The A operand of one row tile and chunk. row: levels of rows g, g + 8; pair: of k, k + 8.
  template <int TILE_AT, int CHUNK>
  __device__ __forceinline__ void fragment(u32* a, const Levels* l, const u32* signs) const {
    constexpr int E = (TILE_AT * CHUNKS + CHUNK) * 4;
    const u32 x[4] = {raw<E>(), raw<E + 1>(), raw<E + 2>(), raw<E + 3>()};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const Levels& mine = l[ALONG_K ? i & 1 : i >> 1];
      a[i] = fma2(x[i], mine.step, mine.start);
      if (SIGNS) {  // a ^ (moved & sign bits)
        const u32 moved = signs[i & 1] << (CHUNK % 2 * 8 + i / 2 * 4);
        asm("lop3.b32 %0,%1,0x80008000,%2,0x6A;" : "=r"(a[i]) : "r"(moved), "r"(a[i]));
      }
    }
  }
  // c[tile][h] += A * b[chunk][h]. The order of loops keeps the scales in use few.
  __device__ __forceinline__ void multiply(float (*c)[HT][4], const u32 (*b)[HT][2], u32 params,
                                           int g, int t) const {
    if constexpr (ALONG_K)
      along_k<0>(c, b, params, g, t);
    else
      by_rows<0, 0>(c, b, params, g, t);
  }
  template <int TILE_AT>
  __device__ __forceinline__ void along_k(float (*c)[HT][4], const u32 (*b)[HT][2], u32 params,
                                          int g, int t) const {
    chunks_of<TILE_AT, 0>(c, b, params, g, t);
    if constexpr (TILE_AT + 1 < ROWS) along_k<TILE_AT + 1>(c, b, params, g, t);
  }
  template <int TILE_AT, int GROUP_AT>
  __device__ __forceinline__ void chunks_of(float (*c)[HT][4], const u32 (*b)[HT][2], u32 params,
                                            int g, int t) const {
    Levels l[2];
    u32 signs[2];
    load_along_k(l, signs, params, TILE_AT, GROUP_AT, g, t);
    run<TILE_AT, GROUP_AT * CHUNKS_PER_GROUP, CHUNKS_PER_GROUP>(c, b, l, signs);
    if constexpr (GROUP_AT + 1 < K_GROUPS_PER_ROW)
      chunks_of<TILE_AT, GROUP_AT + 1>(c, b, params, g, t);
  }
  template <int TILE_AT, int CHUNK, int LEFT>
  __device__ __forceinline__ void run(float (*c)[HT][4], const u32 (*b)[HT][2], const Levels* l,
                                      const u32* signs) const {
    u32 a[4];
    fragment<TILE_AT, CHUNK>(a, l, signs);
#pragma unroll
    for (int h = 0; h < HT; h++) mma(c[TILE_AT][h], a, b[CHUNK][h]);
    if constexpr (LEFT > 1) run<TILE_AT, CHUNK + 1, LEFT - 1>(c, b, l, signs);
  }
  template <int GROUP_AT, int CHUNK>
  __device__ __forceinline__ void by_rows(float (*c)[HT][4], const u32 (*b)[HT][2], u32 params,
                                          int g, int t) const {
    Levels l[2];
    load_by_rows(l, params, GROUP_AT, CHUNK, t);
    down<GROUP_AT * ROW_TILES_PER_GROUP, CHUNK, ROW_TILES_PER_GROUP>(c, b, l);
    if constexpr (CHUNK + 1 < CHUNKS)
      by_rows<GROUP_AT, CHUNK + 1>(c, b, params, g, t);
    else if constexpr ((GROUP_AT + 1) * ROW_TILES_PER_GROUP < ROWS)
      by_rows<GROUP_AT + 1, 0>(c, b, params, g, t);
  }
  template <int TILE_AT, int CHUNK, int LEFT>
  __device__ __forceinline__ void down(float (*c)[HT][4], const u32 (*b)[HT][2],
                                       const Levels* l) const {
    u32 a[4];
    fragment<TILE_AT, CHUNK>(a, l, nullptr);
#pragma unroll
    for (int h = 0; h < HT; h++) mma(c[TILE_AT][h], a, b[CHUNK][h]);
    if constexpr (LEFT > 1) down<TILE_AT + 1, CHUNK, LEFT - 1>(c, b, l);
  }
};
