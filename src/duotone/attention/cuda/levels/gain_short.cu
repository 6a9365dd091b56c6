// The fitted gain of blocks of up to ROOM tokens, and their last levels: a block of threads each.
//
// Fewer tokens than channels have the smaller Gram matrices, [tokens, tokens]:
//
//     <S, X X_hat^T> = sum(T * G),   <S, X_hat X_hat^T> = sum(T * T),   G = X^T X,   T = X^T X_hat
//
// levels/call.cuh has the macros, and ROOM: tokens, a multiple of 64.
#include "packing/device.cuh"
#include "packing/levels.cuh"
#include "packing/tile.cuh"
#include "packing/units.cuh"
#include "levels/call.cuh"
#include "levels/order.cuh"
#include "levels/gain.cuh"
#define SIDE 4  // of the square of products that a thread has
static_assert(THREADS == (64 / SIDE) * (64 / SIDE), "threads cover 64 x 64 products");

struct Products {
  float g[SIDE][SIDE], t[SIDE][SIDE];

  __device__ __forceinline__ void find(const GramTiles& tiles, int a, int b) {
#pragma unroll 2
    for (int c = 0; c < CHANNELS; c++) {
      const float4 left = *(const float4*)(tiles.x + c * GRAM_ROW + a);
      const float4 right = *(const float4*)(tiles.x + c * GRAM_ROW + b);
      const float4 decoded = *(const float4*)(tiles.decoded + c * GRAM_ROW + b);
      const float x[4] = {left.x, left.y, left.z, left.w};
      const float y[4] = {right.x, right.y, right.z, right.w};
      const float z[4] = {decoded.x, decoded.y, decoded.z, decoded.w};
#pragma unroll
      for (int i = 0; i < SIDE; i++)
#pragma unroll
        for (int j = 0; j < SIDE; j++) g[i][j] += x[i] * y[j], t[i][j] += x[i] * z[j];
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    level_gain_short(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(16) char shared[];
  __shared__ ChannelLevels levels[CHANNELS];
  const Block block(at, blockIdx.x);
  const GramTiles tiles = {(float*)shared, (float*)shared + CHANNELS * GRAM_ROW};
  load_levels(levels, at, block.row);
  __syncthreads();
  tiles.load(block, at.x.token, 0, levels);
  __syncthreads();
  float cross = 0.f, power = 0.f;
  for (int a = 0; a < block.tokens; a += 64)
    for (int b = 0; b < block.tokens; b += 64) {
      Products own = {};
      own.find(tiles, a + threadIdx.x / 16 * SIDE, b + threadIdx.x % 16 * SIDE);
#pragma unroll
      for (int i = 0; i < SIDE; i++)
#pragma unroll
        for (int j = 0; j < SIDE; j++)
          cross += own.t[i][j] * own.g[i][j], power += own.t[i][j] * own.t[i][j];
    }
  cross = block_sum(cross), power = block_sum(power);
  write_levels(at, block.row, power > 0.f ? cross / power : 1.f);
}
