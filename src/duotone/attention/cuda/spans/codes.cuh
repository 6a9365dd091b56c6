// Codes of one width as operands of integer products: A from packed words.
#include "shared/integer_products.cuh"
__device__ __forceinline__ void mma_v_signed(int* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// Word N of codes. Of 3 bits it is put together from planes (layout.py): nibbles, whose upper bit
// is anything. By one instruction; of operators the compiler makes two for every code.
template <int BITS, int N>
__device__ __forceinline__ u32 code_word(const u32* words) {
  if constexpr (BITS != 3)
    return words[N];
  else {
    constexpr int FIRST = N / 4 * 3, AT = N % 4;
    const u32 low = words[FIRST + AT / 2] >> AT % 2 * 2;
    const u32 high = AT < 2 ? words[FIRST + 2] << (2 - AT) : words[FIRST + 2] >> (AT - 2);
    u32 y;  // low where 0x33333333 has ones, high elsewhere
    asm("lop3.b32 %0,%1,%2,0x33333333,0xE4;" : "=r"(y) : "r"(low), "r"(high));
    return y;
  }
}
// A register of K: row half `half` of 16 keys `sub`, register r of the row.
template <int E>
__device__ __forceinline__ u32 k_register(const u32* words) {
  const int at = E % KPB * K_STEP;
  const u32 word = code_word<KB, E / KPB>(words), mask = ((1u << KB) - 1) * 0x01010101u;
  if (KB == 8) return word;
  if (!K_ALIGNED) return (word >> at) & mask;
  return (word >> (at & 4)) & (mask << (at & 3));
}
// A register of V: keys half u, register a, channels tile m.
template <int E>
__device__ __forceinline__ u32 v_register(const u32* words) {
  const int at = E % VPB * V_STEP;
  const u32 word = code_word<VB, E / VPB>(words), mask = ((1u << VB) - 1) * 0x01010101u;
  if (VB == 8) return word;
  if (!V_ALIGNED) return (word >> at) & mask;
  if ((V_RAW && at == 8 - VB) || (V_SIGNED && at == 6)) return word;
  return word & (mask << at);
}

template <int SUB, int M>
struct KDot {
  static __device__ __forceinline__ void run(int (*c)[4], const u32* words, const u32 (*q)[KREGS],
                                             const int* bias) {
    u32 a[4] = {k_register<(SUB * 2) * KREGS + 2 * M>(words),
                k_register<(SUB * 2 + 1) * KREGS + 2 * M>(words),
                k_register<(SUB * 2) * KREGS + 2 * M + 1>(words),
                k_register<(SUB * 2 + 1) * KREGS + 2 * M + 1>(words)};
#pragma unroll
    for (int h = 0; h < HT; h++) {
      if (M == 0)
        mma_k_first(c[h], a, q[h] + 2 * M, bias);
      else
        mma_k(c[h], a, q[h] + 2 * M);
    }
    if constexpr (2 * M + 2 < KREGS) KDot<SUB, M + 1>::run(c, words, q, bias);
  }
};
template <int U, int M>
struct VDot {
  static __device__ __forceinline__ void run(int (*acc)[MT][4], const u32* words,
                                             const u32 (*p)[2][2]) {
    u32 a[4] = {v_register<(U * 4 + 0) * MT + M>(words), v_register<(U * 4 + 1) * MT + M>(words),
                v_register<(U * 4 + 2) * MT + M>(words), v_register<(U * 4 + 3) * MT + M>(words)};
#pragma unroll
    for (int h = 0; h < HT; h++) {
      if (V_SIGNED && M % 8 == 6)
        mma_v_signed(acc[h][M], a, p[h][U]);
      else
        mma_v(acc[h][M], a, p[h][U]);
    }
    if constexpr (M + 1 < MT) VDot<U, M + 1>::run(acc, words, p);
  }
};

__device__ __forceinline__ float channel_weight(int row_half,
                                                int m) {  // undoes the bit of a code
  const int at = ((row_half * MT + m) % VPB) * V_STEP;
  return (!V_ALIGNED || VB == 8) ? 1.f : 1.f / (float)(1 << at);
}
