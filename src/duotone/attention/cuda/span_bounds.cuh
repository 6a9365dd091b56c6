// Minima and maxima of every channel over the tokens of a block, read in units of ALIGN bytes.
#define UNITS (CHANNELS * ELEMENT_BYTES / ALIGN)
#define PER_UNIT (ALIGN / ELEMENT_BYTES)
#define UNIT_WORDS (ALIGN < 4 ? 1 : ALIGN / 4)
#define AT_ONCE 4                   // units that a thread has under way
#define TOGETHER (THREADS / UNITS)  // tokens that a block of threads reads at a time

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

__device__ __forceinline__ void load_unit(u32* x, const char* at) {
  if constexpr (ALIGN == 16) {
    const uint4 y = __ldg((const uint4*)at);
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
  } else if constexpr (ALIGN == 8) {
    const uint2 y = __ldg((const uint2*)at);
    x[0] = y.x, x[1] = y.y;
  } else if constexpr (ALIGN == 4)
    x[0] = __ldg((const u32*)at);
  else
    x[0] = __ldg((const u16*)at) * 0x10001u;
}

// Bounds of tokens [first, last) in `seen`, [low, high][token % TOGETHER][channel].
__device__ __forceinline__ void bound_tokens(float (*seen)[TOGETHER][CHANNELS], const char* head,
                                             int stride, const long long* index, int first,
                                             int last) {
  const int row = threadIdx.x / UNITS, unit = threadIdx.x % UNITS;
  if (row >= TOGETHER) return;
  Word low[UNIT_WORDS], high[UNIT_WORDS];
#pragma unroll
  for (int w = 0; w < UNIT_WORDS; w++) low[w] = word_of(INFINITE), high[w] = word_of(-INFINITE);
#pragma unroll 1
  for (int token = first + row; token < last; token += AT_ONCE * TOGETHER) {
    int from[AT_ONCE];
    u32 x[AT_ONCE][UNIT_WORDS];
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++)  // the last token again changes no bound
      from[n] = (int)index[min(token + n * TOGETHER, last - 1)];
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++)
      load_unit(x[n], head + (long long)from[n] * stride + unit * ALIGN);
#pragma unroll
    for (int n = 0; n < AT_ONCE; n++)
#pragma unroll
      for (int w = 0; w < UNIT_WORDS; w++)
        low[w] = least(low[w], word_of(x[n][w])), high[w] = greatest(high[w], word_of(x[n][w]));
  }
#pragma unroll
  for (int n = 0; n < PER_UNIT; n++) {
    seen[0][row][unit * PER_UNIT + n] = element(low, n);
    seen[1][row][unit * PER_UNIT + n] = element(high, n);
  }
}
