// The last step of a gain that a block's own covariances fit (quant.ranges.fitted_gain). Its
// kernels read elements about the mean, and the levels of their codes.
//
//   gain = <S, cov(x, x_hat)> / <S, cov(x_hat)>,   S = cov(x)

// Levels that a channel's codes are chosen by, and those they stand for before the gain.
struct ChannelLevels {
  Levels chosen;
  float mean, scale, offset, top;

  __device__ __forceinline__ void read(const Arguments& at, long long row, int slot) {
    const bool coded = slot < CODED;
    chosen.read(coded ? at.chosen_scale[row * CODED + slot] : 0,
                coded ? at.chosen_zero[row * CODED + slot] : 0);
    const float* fine = at.fine + row * 3 * CHANNELS + slot;
    mean = fine[0], scale = fine[CHANNELS], offset = fine[2 * CHANNELS];
    top = (float)((1 << bits_of_slot(slot)) - 1);
  }
  // The level of the code of x, about the mean.
  __device__ __forceinline__ float decode(float x) const {
    const float steps = quotient(__fsub_rn(x, chosen.zero), chosen.scale, chosen.inverse);
    return fminf(floorf(fmaxf(steps + 0.5f, 0.f)), top) * scale + offset;
  }
};

// x and x_hat of ROOM tokens in shared memory, [channel][token], rows of GRAM_ROW; then zeros.
#define GRAM_ROW (ROOM + 4)
struct GramTiles {
  float *x, *decoded;

  __device__ __forceinline__ void load(const Block& block, int stride, int first,
                                       const ChannelLevels* levels) const {
    for (int n = threadIdx.x; n < UNITS * ROOM; n += THREADS) {
      const int unit = n / ROOM, token = n % ROOM;
      const bool real = first + token < block.tokens;
      u32 y[UNIT_WORDS] = {};
      const char* from = block.data + (long long)(first + token) * stride;
      if (real) load_unit(y, from + unit * ALIGN);
      Word words[UNIT_WORDS];
#pragma unroll
      for (int w = 0; w < UNIT_WORDS; w++) words[w] = word_of(y[w]);
#pragma unroll
      for (int i = 0; i < PER_UNIT; i++) {
        const int c = unit * PER_UNIT + i;
        const float value = element(words, i);
        x[c * GRAM_ROW + token] = real ? value - levels[c].mean : 0.f;
        decoded[c * GRAM_ROW + token] = real ? levels[c].decode(value) : 0.f;
      }
    }
  }
};

__device__ __forceinline__ void load_levels(ChannelLevels* levels, const Arguments& at,
                                            long long row) {
  for (int slot = threadIdx.x; slot < CHANNELS; slot += THREADS)
    levels[at.order[row * CHANNELS + slot]].read(at, row, slot);
}

// Sum over the block of threads, for all of them.
__device__ __forceinline__ float block_sum(float x) {
  __shared__ float of_warps[THREADS / 32];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.f;
  for (int w = 0; w < THREADS / 32; w++) sum += of_warps[w];
  return sum;
}

__device__ __forceinline__ void write_levels(const Arguments& at, long long row, float gain) {
  for (int slot = threadIdx.x; slot < CHANNELS; slot += THREADS) {
    const float* fine = at.fine + row * 3 * CHANNELS + slot;
    at.zero[row * CHANNELS + slot] = float_to_half(fine[0] + gain * fine[2 * CHANNELS]);
    if (slot < CODED) at.scale[row * CODED + slot] = float_to_half(gain * fine[CHANNELS]);
  }
}
