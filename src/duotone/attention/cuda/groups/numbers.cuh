// fp16 arithmetic of two numbers per register, and products.
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

__device__ __forceinline__ void mma_anew(float* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.f));
}

__device__ __forceinline__ void mma8(float* c, u32 a0, u32 a1, u32 b) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5},{%6},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(b));
}

// 2^e twice.
#define TWO_TO(E) ((u32)((15 + (E)) << 10) * 0x00010001u)

// Sums of B over groups of k, which bring in what all numbers of a group are counted from.
// starts: of rows g (lower half) and g + 8.
struct SumsInRegisters {
  float2 sums[HT];  // of q heads 8 h + 2 t and 8 h + 2 t + 1

  __device__ __forceinline__ void add(float (*c)[4], int, u32 starts) const {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int h = 0; h < HT; h++)
        c[h][i] =
            fmaf(half_to_float(starts >> (i >> 1) * 16), i & 1 ? sums[h].y : sums[h].x, c[h][i]);
  }
};
// These sums as an operand B whose only rows are 0, the sums, and 2, what rounding took from them.
// A has the start of a row at every even k, of the row 8 away at the odd ones.
template <int GROUPS>
struct SumsInB {
  u32 b[GROUPS][HT];

  __device__ __forceinline__ void set(const float2 (*sums)[HT], int t) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++)
#pragma unroll
      for (int h = 0; h < HT; h++) {
        const float2 x = sums[group][h];
        const u32 top = pack2(x.x, x.y);
        const u32 rest = pack2(x.x - half_to_float(top), x.y - half_to_float(top >> 16));
        const u32 tops = transpose8x8(top), rests = transpose8x8(rest);
        b[group][h] = t == 0 ? tops & 0xFFFF : t == 1 ? rests & 0xFFFF : 0;
      }
  }
  __device__ __forceinline__ void add(float (*c)[4], int group, u32 starts) const {
#pragma unroll
    for (int h = 0; h < HT; h++) mma8(c[h], starts, __byte_perm(starts, 0, 0x1032), b[group][h]);
  }
};
