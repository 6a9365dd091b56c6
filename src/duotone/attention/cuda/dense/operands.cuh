// K and V of 16 tokens as operands A of the products, and their type's conversions.
//
// What multiplies what: column k of A must be row k of B, and which channel of a chunk of 16 that
// is is free. `channel_of` says it of K, `channel_of_row` which channels the rows of V's A are.
#if KV == 1
#define KV_TYPE "bf16"
#else
#define KV_TYPE "f16"
#endif
// fp8 in bits: without an instruction that widens it, for sm_80 (or where the host asks for it).
// Numbers then are 2^-8 of what they should be, NaN among them: as 480.
#ifndef BY_BITS
#define BY_BITS (__CUDA_ARCH__ < 890)
#endif
#define KV_UNIT (KV == 2 && BY_BITS ? 256.f : 1.f)

__device__ __forceinline__ void mma(float* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." KV_TYPE "." KV_TYPE
      ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 d;
  asm("cvt.rn." KV_TYPE "x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ float low_half(u32 x) {
  return KV == 1 ? __uint_as_float(x << 16) : half_to_float((u16)x);
}
// x as two digits: x rounded, and what is left.
__device__ __forceinline__ u32 two_digits(float x) {
  const float rest = x - low_half(pack2(x, 0.f));
  return pack2(x, rest);
}
// Four 8x8 matrices of 16 bits; a lane's address is that of a row.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32* a, u32 address) {
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
}

#if KV == 2
// Bytes 2 HALF and 2 HALF + 1, which are e4m3, as two fp16.
template <int HALF>
__device__ __forceinline__ u32 widened(u32 x) {
#if BY_BITS
  const u32 y = __byte_perm(x, 0, HALF ? 0x3424 : 0x1404);
  return (y & 0x80008000u) | (y >> 1 & 0x3F803F80u);
#else
  u32 y;
  if (HALF)
    asm("{.reg .b16 low,high;\n mov.b32 {low,high},%1;\n cvt.rn.f16x2.e4m3x2 %0,high;}"
        : "=r"(y)
        : "r"(x));
  else
    asm("cvt.rn.f16x2.e4m3x2 %0,%1;" : "=r"(y) : "h"((u16)x));
  return y;
#endif
}
// Two 8x8 matrices of 16 bits, the first of the four.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_two_matrices(u32* a, u32 address) {
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1},[%2];"
                 : "=r"(a[0]), "=r"(a[1])
                 : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1},[%2];"
                 : "=r"(a[0]), "=r"(a[1])
                 : "r"(address));
}
// A matrix of 16 bits is 8 tokens of a chunk of 16 channels: a lane gets channels 4 t to 4 t + 3 of
// token g, or, transposed, channels 2 g and 2 g + 1 of tokens 2 t and 2 t + 1. Four of them are two
// chunks of 16 tokens.
#define CHUNKS_AT_ONCE 2
__device__ __forceinline__ constexpr int channel_of(int t, int i) {
  return 4 * t + 2 * i;
}
__device__ __forceinline__ constexpr int channel_of_row(int g, int half) {
  return 2 * g + half;
}
template <bool OF_VALUES>
__device__ __forceinline__ void load_chunks(u32 (*a)[4], u32 rows, int chunk, int lane) {
  const u32 address = rows + (lane & 15) * ROW_BYTES + (lane >> 4) * 16 + chunk * 16;
  u32 x[4];
  if (chunk + 1 < KC)
    load_matrices<OF_VALUES>(x, address);
  else
    load_two_matrices<OF_VALUES>(x, address);
#pragma unroll
  for (int c = 0; c < 2 && chunk + c < KC; c++)
#pragma unroll
    for (int i = 0; i < 2; i++) {  // tokens 8 i to 8 i + 7
      const u32 y = OF_VALUES ? __byte_perm(x[2 * c + i], 0, 0x3120) : x[2 * c + i];
      a[c][OF_VALUES ? 2 * i : i] = widened<0>(y);
      a[c][OF_VALUES ? 2 * i + 1 : i + 2] = widened<1>(y);
    }
}
#else
#define CHUNKS_AT_ONCE 1
__device__ __forceinline__ constexpr int channel_of(int t, int i) {
  return 2 * t + 8 * i;
}
__device__ __forceinline__ constexpr int channel_of_row(int g, int half) {
  return g + 8 * half;
}
template <bool OF_VALUES>
__device__ __forceinline__ void load_chunks(u32 (*a)[4], u32 rows, int chunk, int lane) {
  const int row = OF_VALUES ? (lane & 7) + (lane >> 4) * 8 : lane & 15;
  const u32 offset = (OF_VALUES ? lane >> 3 & 1 : lane >> 4) * 16;
  load_matrices<OF_VALUES>(a[0], rows + row * ROW_BYTES + offset + chunk * 32);
}
#endif
