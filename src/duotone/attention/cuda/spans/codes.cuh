// Codes of one width as operands of integer products: A from packed words.
#include "shared/integer_products.cuh"
__device__ __forceinline__ void mma_v_signed(int* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// A register of K: row half `half` of 16 keys `sub`, register r of the row.
template <int E>
__device__ __forceinline__ u32 k_register(const u32* words) {
  const int word = E / KPB, at = E % KPB * KB;
  const u32 mask = ((1u << KB) - 1) * 0x01010101u;
  if (KB == 8) return words[word];
  if (!K_ALIGNED) return (words[word] >> at) & mask;
  return (words[word] >> (at & 4)) & (mask << (at & 3));
}
// A register of V: keys half u, register a, channels tile m.
template <int E>
__device__ __forceinline__ u32 v_register(const u32* words) {
  const int word = E / VPB, at = E % VPB * VB;
  const u32 mask = ((1u << VB) - 1) * 0x01010101u;
  if (VB == 8) return words[word];
  if (!V_ALIGNED) return (words[word] >> at) & mask;
  if ((V_RAW && at == 8 - VB) || (V_SIGNED && at == 6)) return words[word];
  return words[word] & (mask << at);
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
  const int at = ((row_half * MT + m) % VPB) * VB;
  return (!V_ALIGNED || VB == 8) ? 1.f : 1.f / (float)(1 << at);
}
