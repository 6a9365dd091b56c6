// A tile of dense K or V that lies in memory as e4m3: fp16 from there on, exactly.
//
// What else packing/tile.cuh loads without registers passes through them: AT_ONCE units of ALIGN bytes
// are asked for before the first of them is waited for.
static_assert(INPUT == 0, "e4m3 becomes fp16");
#define AT_ONCE 8
#define WORDS_READ (ALIGN < 4 ? 1 : ALIGN / 4)

// The two lowest bytes.
__device__ __forceinline__ Pair widened(u32 bytes) {
#if __CUDA_ARCH__ >= 890
  Pair y;
  asm("cvt.rn.f16x2.e4m3x2 %0,%1;" : "=r"(y.x) : "h"((u16)bytes));
  return y;
#else
  float x[2];
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 byte = bytes >> 8 * i, size = byte & 0x7F;
    // The exponent's bias is 120 less than that of a float.
    x[i] = size == 0x7F ? __uint_as_float(0x7FC00000) : __uint_as_float(size << 20) * 0x1p120f;
    if (byte & 0x80) x[i] = -x[i];
  }
  return pair_of(x[0], x[1]);
#endif
}
__device__ __forceinline__ void read_unit(u32* x, const char* at) {
  if constexpr (ALIGN == 16) {
    const uint4 y = __ldg((const uint4*)at);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else if constexpr (ALIGN == 8) {
    const uint2 y = __ldg((const uint2*)at);
    x[0] = y.x, x[1] = y.y;
  } else if constexpr (ALIGN == 4) {
    x[0] = __ldg((const u32*)at);
  } else if constexpr (ALIGN == 2) {
    x[0] = __ldg((const u16*)at);
  } else {
    x[0] = __ldg((const unsigned char*)at);
  }
}
__device__ __forceinline__ void store_unit(u32 target, const u32* x) {
  if constexpr (ALIGN == 1) {
    store_shared_half(target, (u16)widened(x[0]).x);
  } else if constexpr (ALIGN == 2) {
    store_shared(target, widened(x[0]).x);
  } else {
#pragma unroll
    for (int i = 0; i < WORDS_READ; i++)
      store_shared(target + 8 * i, widened(x[i]).x, widened(x[i] >> 16).x);
  }
}
// As the other one: lane l gives the position of token l; -1: none, which becomes 0.
template <bool WHOLE = false>
__device__ __forceinline__ void ask_for_tile(u32 tile, const char* head, int stride, int position,
                                             u32 lane, u32 part = 0, u32 parts = 1) {
  constexpr u32 UNITS = CHANNELS / ALIGN, ALL = TILE * UNITS;
  for (u32 first = 32 * part; first < ALL; first += AT_ONCE * 32 * parts) {
    u32 x[AT_ONCE][WORDS_READ] = {};
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const u32 n = first + i * 32 * parts + lane, row = n / UNITS;
      const int from = __shfl_sync(FULL, position, row % TILE);
      if (n < ALL && (WHOLE || from >= 0))
        read_unit(x[i], head + (long long)from * stride + n % UNITS * ALIGN);
    }
#pragma unroll
    for (int i = 0; i < AT_ONCE; i++) {
      const u32 n = first + i * 32 * parts + lane;
      if (n < ALL) store_unit(tile + n / UNITS * ROW_BYTES + n % UNITS * ALIGN * 2, x[i]);
    }
  }
  fill_rows(tile, lane, part, parts);
}
