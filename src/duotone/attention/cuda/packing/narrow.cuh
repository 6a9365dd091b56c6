// 16 numbers of fp16, bf16 or fp32 as e4m3: the nearest, ties to even, +-448 beyond; a NaN stays
// one.
//
// Expects NARROW (1: fp16, 2: bf16, 3: fp32).
typedef unsigned int u32;
typedef unsigned short u16;
#define WIDE_BYTES (NARROW == 3 ? 4 : 2)

// Two numbers in a register, or one.
__device__ __forceinline__ void numbers_of(float* y, u32 x) {
#if NARROW == 1
  asm("{.reg .b16 low,high;\n mov.b32 {low,high},%2;\n cvt.f32.f16 %0,low;\n cvt.f32.f16 %1,high;}"
      : "=f"(y[0]), "=f"(y[1])
      : "r"(x));
#elif NARROW == 2
  y[0] = __uint_as_float(x << 16), y[1] = __uint_as_float(x & 0xFFFF0000u);
#else
  y[0] = __uint_as_float(x);
#endif
}

#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ u32 two_narrow(float low, float high) {
  u16 y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0,%1,%2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}
#else
#define LARGEST 0x43E00000u         // 448
#define LEAST_NORMAL 0x3C800000u    // 2^-6
#define OF_LEAST_DIGIT 0x46800000u  // 2^14: its last digit is the least of e4m3, 2^-9
__device__ __forceinline__ u32 narrow(float x) {
  const u32 bits = __float_as_uint(x), size = bits & 0x7FFFFFFFu, sign = bits >> 24 & 0x80;
  if (size > 0x7F800000u) return sign | 0x7F;
  if (size >= LARGEST) return sign | 0x7E;
  if (size < LEAST_NORMAL)
    return sign | (__float_as_uint(__uint_as_float(size) + __uint_as_float(OF_LEAST_DIGIT)) -
                   OF_LEAST_DIGIT);
  // The exponent's bias is 120 less; half of what is cut off, less one unless the digit is odd.
  return sign | (size - (120u << 23) + 0x7FFFF + (size >> 20 & 1)) >> 20;
}
__device__ __forceinline__ u32 two_narrow(float low, float high) {
  return narrow(low) | narrow(high) << 8;
}
#endif

// 16 bytes of a row in the windows.
__device__ __forceinline__ uint4 load_vector(const char* row, int vector) {
  const uint4* from = (const uint4*)row + vector * WIDE_BYTES;
  float x[16];
#pragma unroll
  for (int i = 0; i < WIDE_BYTES; i++) {
    const uint4 y = from[i];
    constexpr int EACH = 4 / WIDE_BYTES;
    numbers_of(x + 4 * EACH * i, y.x), numbers_of(x + 4 * EACH * i + EACH, y.y);
    numbers_of(x + 4 * EACH * i + 2 * EACH, y.z), numbers_of(x + 4 * EACH * i + 3 * EACH, y.w);
  }
  u32 z[4];
#pragma unroll
  for (int i = 0; i < 4; i++)
    z[i] = two_narrow(x[4 * i], x[4 * i + 1]) | two_narrow(x[4 * i + 2], x[4 * i + 3]) << 16;
  return make_uint4(z[0], z[1], z[2], z[3]);
}
