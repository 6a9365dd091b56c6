// Rows of dense K and V in units of ALIGN bytes, loaded past shared memory.
//
// Expects CHANNELS, ALIGN.
#define UNITS (CHANNELS * ELEMENT_BYTES / ALIGN)
#define PER_UNIT (ALIGN / ELEMENT_BYTES)
#define UNIT_WORDS (ALIGN < 4 ? 1 : ALIGN / 4)

#if INPUT == 2
typedef float Word;
__device__ __forceinline__ Word word_of(u32 x) {
  return __uint_as_float(x);
}
__device__ __forceinline__ Word word_of(float x) {
  return x;
}
__device__ __forceinline__ float element(const Word* x, int n) {
  return x[n];
}
#else
typedef Pair Word;
__device__ __forceinline__ Word word_of(u32 x) {
  return {x};
}
__device__ __forceinline__ Word word_of(float x) {
  return pair_of(x, x);
}
__device__ __forceinline__ float element(const Word* x, int n) {
  return number(x[n / 2], n % 2);
}
#endif

template <int BYTES = ALIGN>
__device__ __forceinline__ void load_unit(u32* x, const char* at) {
  if constexpr (BYTES == 16) {
    const uint4 y = __ldg((const uint4*)at);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else if constexpr (BYTES == 8) {
    const uint2 y = __ldg((const uint2*)at);
    x[0] = y.x, x[1] = y.y;
  } else if constexpr (BYTES == 4)
    x[0] = __ldg((const u32*)at);
  else
    x[0] = __ldg((const u16*)at) * 0x10001u;
}
