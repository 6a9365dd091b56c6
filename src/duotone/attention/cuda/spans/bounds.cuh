// Minima and maxima of every channel over the tokens of a block, read in units of ALIGN bytes.
#include "packing/units.cuh"
#define AT_ONCE 4                   // units that a thread has in flight
#define TOGETHER (THREADS / UNITS)  // tokens that a block of threads reads at a time

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
