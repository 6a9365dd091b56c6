// A sub-block of LANES threads that works at one channel, which it has in shared memory.
//
// Expects LANES: a power of two up to 32, or all threads of the block.
#if INPUT == 2
typedef float Element;
#else
typedef u16 Element;
#endif
#define VECTOR (16 / ELEMENT_BYTES)
#define SUB_BLOCK_WARPS (LANES > 32 ? LANES / 32 : 1)
static_assert(LANES <= 32 || LANES == THREADS,
              "sub-blocks of several warps meet at the block's barrier");

__device__ __forceinline__ float element_of(u32 word, int half) {
#if INPUT == 2
  return __uint_as_float(word);
#else
  const Pair x = {word};
  return number(x, half);
#endif
}

struct SubBlock {
  const Element* x;  // of its channel
  int tokens, lane;
  float mean;

  // visit(x - mean, token) for the tokens of this lane.
  template <class F>
  __device__ __forceinline__ void each(F visit) const {
    const int vectors = tokens / VECTOR;
#pragma unroll 1
    for (int v = lane; v < vectors; v += LANES) {
      const uint4 y = *(const uint4*)(x + v * VECTOR);
      const u32 words[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int i = 0; i < VECTOR; i++)
        visit(element_of(words[i * ELEMENT_BYTES / 4], i % 2) - mean, v * VECTOR + i);
    }
#pragma unroll 1
    for (int t = vectors * VECTOR + lane; t < tokens; t += LANES)
      visit(element_at((const char*)(x + t), 0) - mean, t);
  }
  // Every lane gets the sums over the sub-block.
  template <int N>
  __device__ __forceinline__ void sum(float* y) const {
    over_lanes<N>(y, [](float a, float b) { return a + b; });
  }
  template <int N>
  __device__ __forceinline__ void greatest_of(float* y) const {
    over_lanes<N>(y, [](float a, float b) { return greatest(a, b); });
  }
  template <int N, class F>
  __device__ __forceinline__ void over_lanes(float* y, F both) const {
#pragma unroll
    for (int mask = (LANES > 32 ? 32 : LANES) / 2; mask; mask /= 2)
#pragma unroll
      for (int i = 0; i < N; i++) y[i] = both(y[i], __shfl_xor_sync(FULL, y[i], mask));
    if constexpr (SUB_BLOCK_WARPS > 1) {
      __shared__ float of_warps[8][SUB_BLOCK_WARPS];
      static_assert(N <= 8, "more sums than there is room for");
      const int warp = threadIdx.x / 32;
#pragma unroll
      for (int i = 0; i < N; i++)
        if (threadIdx.x % 32 == 0) of_warps[i][warp] = y[i];
      __syncthreads();
#pragma unroll
      for (int i = 0; i < N; i++) {
        y[i] = of_warps[i][0];
        for (int w = 1; w < SUB_BLOCK_WARPS; w++) y[i] = both(y[i], of_warps[i][w]);
      }
      __syncthreads();
    }
  }
};
