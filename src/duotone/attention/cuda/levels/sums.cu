// Sums that levels are found from, over the tokens of every block, in parts. Readers add the parts
// up in their order. levels/call.cuh has the macros.
//
//   level_moments   sum(x - first), sum((x - first)^2) of every channel
//   level_energies  weight w_t = (sum_c (x_tc - mean_c)^2 / E)^energy of every token, and
//                   sum_t(w_t (x_tc - mean_c)^2) of every channel. E is the block's mean energy by
//                   the moments
//
// The reference (quant.ranges.energy_weights) has the block's largest energy for E. Neither the
// order of channels nor the gains of `energy_gain` depend on that.
#include "packing/device.cuh"
#include "packing/tile.cuh"
#include "packing/units.cuh"
#include "levels/call.cuh"
#include "levels/tokens.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    level_moments(const __grid_constant__ Arguments at) {
  __shared__ float seen[2][TOGETHER][CHANNELS];
  const int row = blockIdx.x / at.splits, split = blockIdx.x - row * at.splits;
  const Block block(at, row);
  const Part part(block, split, at.splits);
  const TokenLane own;
  float start[LANE_CHANNELS], x[LANE_CHANNELS], sum[LANE_CHANNELS] = {},
                                                squares[LANE_CHANNELS] = {};
  if (part.first < part.last) own.load(start, block.data);
#pragma unroll 4
  for (int t = part.first + own.row; t < part.last; t += TOGETHER) {
    own.load(x, block.data + (long long)t * at.x.token);
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
      const float d = x[i] - start[i];
      sum[i] += d, squares[i] += d * d;
    }
  }
  own.scatter(seen[0][own.row], sum), own.scatter(seen[1][own.row], squares);
  __syncthreads();
  float* target = at.moments + (long long)blockIdx.x * 2 * CHANNELS;
  write_sums(target, seen[0]), write_sums(target + CHANNELS, seen[1]);
}

// Mean energy of the block's tokens, 1 where there is none.
__device__ __forceinline__ float mean_energy(const float* variance) {
  float sum = 0.f;
  for (int c = threadIdx.x % 32; c < CHANNELS; c += 32) sum += variance[c];
  sum = warp_sum(sum);
  return sum > 0.f ? sum : 1.f;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    level_energies(const __grid_constant__ Arguments at) {
  __shared__ float seen[TOGETHER][CHANNELS], means[CHANNELS], variance[CHANNELS];
  const int row = blockIdx.x / at.splits, split = blockIdx.x - row * at.splits;
  const Block block(at, row);
  const Part part(block, split, at.splits);
  const TokenLane own;
  for (int c = threadIdx.x; c < CHANNELS; c += THREADS) {
    const float count = (float)max(block.tokens, 1), shift = moment(at, block, 0, c) / count;
    means[c] = mean_of(at, block, c);
    variance[c] = fmaxf(moment(at, block, 1, c) / count - shift * shift, 0.f);
  }
  __syncthreads();
  float mean[LANE_CHANNELS], x[LANE_CHANNELS], power[LANE_CHANNELS] = {};
  own.gather(mean, means);
  const float usual = ENERGY ? mean_energy(variance) : 1.f;
  float* weights = at.weight + (long long)block.head * at.tokens + block.first;
  // All lanes of a warp take part in all rounds: they add up together.
#pragma unroll 4
  for (int first = part.first; first < part.last; first += TOGETHER) {
    const int t = first + own.row;
    own.load(x, block.data + (long long)min(t, part.last - 1) * at.x.token);
    float energy = 0.f;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) {
      x[i] -= mean[i], x[i] *= x[i];
      energy += x[i];
    }
    float weight = 1.f;
    if (ENERGY) {
      weight = exp2f(at.energy * log2f(own.sum(energy) / usual));
      if (own.lane == 0 && t < part.last) weights[t] = weight;
    }
    if (t >= part.last) weight = 0.f;
#pragma unroll
    for (int i = 0; i < LANE_CHANNELS; i++) power[i] += weight * x[i];
  }
  own.scatter(seen[own.row], power);
  __syncthreads();
  write_sums(at.power + (long long)blockIdx.x * CHANNELS, seen);
}
