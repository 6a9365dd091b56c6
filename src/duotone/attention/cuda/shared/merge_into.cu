// Merges attention over more keys into sums in fp32, by log-sum-exp: a warp per row.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  of a row, an even number
//   INPUT     type of what is merged in, 0: fp16, 1: bf16, 2: fp32
//   WARPS     of a block; ARGUMENTS_BYTES: size of Arguments on the host
#include "packing/device.cuh"

struct Arguments {
  float* sums;      // [tokens, heads, CHANNELS]
  float* lse;       // [heads, lse_tokens], natural logarithm
  const char* part;       // [tokens, heads, CHANNELS]
  const float* part_lse;  // [heads, tokens]; an infinity of either sign: no key
  int tokens, heads, lse_tokens;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    merge_into(const __grid_constant__ Arguments at) {
  const int lane = threadIdx.x & 31, row = blockIdx.x * WARPS + (threadIdx.x >> 5);
  if (row >= at.tokens * at.heads) return;
  const int token = row / at.heads, head = row - token * at.heads;
  float* lse = at.lse + (long long)head * at.lse_tokens + token;
  const float old = *lse, added = at.part_lse[(long long)head * at.tokens + token];
  if (!(added < INFINITE && added > -INFINITE)) return;
  const float top = old > added ? old : added;
  const float mine = expf(old - top), theirs = expf(added - top), total = mine + theirs;
  const Pair* part = (const Pair*)at.part + (long long)row * (CHANNELS / 2);
  float* sums = at.sums + (long long)row * CHANNELS;
  for (int n = lane; n < CHANNELS / 2; n += 32)
    for (int half = 0; half < 2; half++)
      sums[2 * n + half] =
          (sums[2 * n + half] * mine + number(part[n], half) * theirs) / total;
  __syncwarp();
  if (lane == 0) *lse = top + logf(total);
}
