// Few lanes of a warp read a token, each the same channels of every token.
#define TOKEN_LANES (UNITS > 16 ? 32 : UNITS > 8 ? 16 : UNITS > 4 ? 8 : UNITS > 2 ? 4 : UNITS)
#define TOGETHER (THREADS / TOKEN_LANES)  // tokens that a block of threads reads at a time
#define LANE_UNITS ((UNITS + TOKEN_LANES - 1) / TOKEN_LANES)
#define LANE_CHANNELS (LANE_UNITS * PER_UNIT)

struct TokenLane {
  int lane, row;  // of its token's lanes; which of the tokens that are read together

  __device__ __forceinline__ TokenLane()
      : lane(threadIdx.x % TOKEN_LANES), row(threadIdx.x / TOKEN_LANES) {}
  // The channel of a lane's element i; CHANNELS and more: none.
  __device__ __forceinline__ int channel(int i) const {
    return (lane + i / PER_UNIT * TOKEN_LANES) * PER_UNIT + i % PER_UNIT;
  }
  // Elements of a token; 0 where there is no channel.
  __device__ __forceinline__ void load(float* x, const char* token) const {
#pragma unroll
    for (int n = 0; n < LANE_UNITS; n++) {
      const int unit = lane + n * TOKEN_LANES;
      u32 y[UNIT_WORDS];
      Word words[UNIT_WORDS];
      if (unit < UNITS) load_unit(y, token + unit * ALIGN);
#pragma unroll
      for (int w = 0; w < UNIT_WORDS; w++) words[w] = word_of(unit < UNITS ? y[w] : 0u);
#pragma unroll
      for (int i = 0; i < PER_UNIT; i++) x[n * PER_UNIT + i] = element(words, i);
    }
  }
  __device__ __forceinline__ void gather(float* y, const float* of_channels) const {
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++)
      y[i] = channel(i) < CHANNELS ? of_channels[channel(i)] : 0.f;
  }
  __device__ __forceinline__ void scatter(float* of_channels, const float* y) const {
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++)
      if (channel(i) < CHANNELS) of_channels[channel(i)] = y[i];
  }
  // Sum over the lanes of a token.
  __device__ __forceinline__ float sum(float x) const {
#pragma unroll
    for (int mask = TOKEN_LANES / 2; mask; mask /= 2) x += __shfl_xor_sync(FULL, x, mask);
    return x;
  }
};

// The tokens of a block that one of `splits` has.
struct Part {
  int first, last;

  __device__ __forceinline__ Part(const Block& block, int split, int splits)
      : first((int)((long long)block.tokens * split / splits)),
        last((int)((long long)block.tokens * (split + 1) / splits)) {}
};

// Sums of channels over the tokens that were read together.
__device__ __forceinline__ void write_sums(float* target, const float (*seen)[CHANNELS]) {
  for (int c = threadIdx.x; c < CHANNELS; c += THREADS) {
    float sum = 0.f;
    for (int row = 0; row < TOGETHER; row++) sum += seen[row][c];
    target[c] = sum;
  }
}
