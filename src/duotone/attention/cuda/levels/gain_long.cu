// The fitted gain of blocks of more tokens than channels, and their last levels.
//
//   level_spread      parts of S = X X^T, [channels, channels], over a few tokens each
//   level_spread_sum  adds the parts up, into the first
//   level_gain_parts  parts of sum_t(x_t^T S x_hat_t) and sum_t(x_hat_t^T S x_hat_t), which are
//                     <S, cov(x, x_hat)> and <S, cov(x_hat)>
//   level_gain_last   adds these up, in their order, and rounds the levels
//
// levels/call.cuh has the macros, and ROOM: 64, tokens that are in shared memory.
#include "packing/device.cuh"
#include "packing/levels.cuh"
#include "packing/tile.cuh"
#include "packing/units.cuh"
#include "levels/call.cuh"
#include "levels/order.cuh"
#include "levels/gain.cuh"
#define SIDE 64                         // channels of a tile of S
#define TILES (SPREAD_CHANNELS / SIDE)  // of a side of S
#define PAIRS (TILES * (TILES + 1) / 2)
#define TALL (SPREAD_CHANNELS % 128 ? 4 : 8)  // channels of a thread in level_gain_parts
static_assert(THREADS == 256 && ROOM == 64, "threads cover 64 x 64 products");

__device__ __forceinline__ float* spread_of(const Arguments& at, long long row, int part) {
  return at.spread + (row * at.spread_parts + part) * SPREAD_CHANNELS * SPREAD_CHANNELS;
}

// Centred elements of a tile's channels, [token][channel], 0 where there is none.
__device__ __forceinline__ void load_side(float (*target)[SIDE + 4], const Block& block, int stride,
                                          int first, int last, int channel, const float* means) {
  for (int n = threadIdx.x; n < ROOM * SIDE / PER_UNIT; n += THREADS) {
    const int token = n % ROOM, c = channel + n / ROOM * PER_UNIT;
    const bool real = first + token < last && c < CHANNELS;
    u32 y[UNIT_WORDS] = {};
    const char* from = block.data + (long long)(first + token) * stride + c * ELEMENT_BYTES;
    if (real) load_unit(y, from);
    Word words[UNIT_WORDS];
#pragma unroll
    for (int w = 0; w < UNIT_WORDS; w++) words[w] = word_of(y[w]);
#pragma unroll
    for (int i = 0; i < PER_UNIT; i++)
      target[token][c - channel + i] = real ? element(words, i) - means[c + i] : 0.f;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    level_spread(const __grid_constant__ Arguments at) {
  __align__(16) __shared__ float sides[2][ROOM][SIDE + 4];
  __shared__ float means[CHANNELS];
  const int part = blockIdx.x % at.spread_parts, pair = blockIdx.x / at.spread_parts % PAIRS;
  const int own = blockIdx.x / at.spread_parts / PAIRS;
  int right = 0;
  while ((right + 1) * (right + 2) / 2 <= pair) right++;
  const int left = pair - right * (right + 1) / 2;
  const Block block(at, at.first_row + own);
  for (int c = threadIdx.x; c < CHANNELS; c += THREADS) means[c] = mean_of(at, block, c);
  const int first = (int)((long long)block.tokens * part / at.spread_parts);
  const int last = (int)((long long)block.tokens * (part + 1) / at.spread_parts);
  const int row = threadIdx.x / 16 * 4, column = threadIdx.x % 16 * 4;
  float sums[4][4] = {};
  for (int t = first; t < last; t += ROOM) {
    __syncthreads();
    load_side(sides[0], block, at.x.token, t, last, left * SIDE, means);
    load_side(sides[1], block, at.x.token, t, last, right * SIDE, means);
    __syncthreads();
#pragma unroll 4
    for (int k = 0; k < ROOM; k++) {
      const float4 a = *(const float4*)(sides[0][k] + row);
      const float4 b = *(const float4*)(sides[1][k] + column);
      const float x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) sums[i][j] += x[i] * y[j];
    }
  }
  float* target = spread_of(at, own, part);
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int r = left * SIDE + row + i, c = right * SIDE + column + j;
      target[r * SPREAD_CHANNELS + c] = target[c * SPREAD_CHANNELS + r] = sums[i][j];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    level_spread_sum(const __grid_constant__ Arguments at) {
  constexpr int SIZE = SPREAD_CHANNELS * SPREAD_CHANNELS;
  const int own = blockIdx.x / (SIZE / THREADS);
  float* target = spread_of(at, own, 0) + blockIdx.x % (SIZE / THREADS) * THREADS + threadIdx.x;
  float sum = 0.f;
  for (int part = 0; part < at.spread_parts; part++) sum += target[(long long)part * SIZE];
  *target = sum;
}

// Adds the products of 64 tokens to `cross` and `power`.
__device__ __forceinline__ void add_products(float& cross, float& power, const GramTiles& tiles,
                                             const float* spread) {
  const int column = threadIdx.x % 16 * 4;
#pragma unroll 1
  for (int row = threadIdx.x / 16 * TALL; row < CHANNELS; row += 16 * TALL) {
    float sums[TALL][4] = {};
#pragma unroll 4
    for (int c = 0; c < CHANNELS; c++) {
      const float4 d = *(const float4*)(tiles.decoded + c * GRAM_ROW + column);
      const float y[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
      for (int four = 0; four < TALL; four += 4) {
        const float4 s = __ldg((const float4*)(spread + c * SPREAD_CHANNELS + row + four));
        const float x[4] = {s.x, s.y, s.z, s.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int j = 0; j < 4; j++) sums[four + i][j] += x[i] * y[j];
      }
    }
#pragma unroll
    for (int i = 0; i < TALL; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (row + i >= CHANNELS) continue;
        const int at_pair = (row + i) * GRAM_ROW + column + j;
        cross += tiles.x[at_pair] * sums[i][j], power += tiles.decoded[at_pair] * sums[i][j];
      }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    level_gain_parts(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(16) char shared[];
  __shared__ ChannelLevels levels[CHANNELS];
  const int own = blockIdx.x / at.gain_parts, part = blockIdx.x % at.gain_parts;
  const Block block(at, at.first_row + own);
  const GramTiles tiles = {(float*)shared, (float*)shared + CHANNELS * GRAM_ROW};
  load_levels(levels, at, block.row);
  float cross = 0.f, power = 0.f;
  for (int first = part * ROOM; first < block.tokens; first += at.gain_parts * ROOM) {
    __syncthreads();
    tiles.load(block, at.x.token, first, levels);
    __syncthreads();
    add_products(cross, power, tiles, spread_of(at, own, 0));
  }
  cross = block_sum(cross), power = block_sum(power);
  float* target = at.products + ((long long)block.row * at.gain_parts + part) * 2;
  if (threadIdx.x == 0) target[0] = cross, target[1] = power;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    level_gain_last(const __grid_constant__ Arguments at) {
  const float* from = at.products + (long long)blockIdx.x * at.gain_parts * 2;
  float cross = 0.f, power = 0.f;
  for (int part = 0; part < at.gain_parts; part++)
    cross += from[2 * part], power += from[2 * part + 1];
  write_levels(at, blockIdx.x, power > 0.f ? cross / power : 1.f);
}
