// Merges the parts of every kv head, where the decode kernels of a call leave that to a last
// launch.
//
// A part that takes a ticket fences, counts and waits for the answer, about 2 us. Where there are
// many parts, reading all of them once more costs less. A warp merges one q head.
//
// Compiled by NVRTC with these macros:
//   CHANNELS, G, QUERY, OUT, OVERLAP, ARGUMENTS_BYTES  as in spans/decode.cu
//   WARPS  q heads per block
#include "shared/call.cuh"
#include "shared/merged.cuh"

struct Arguments : Call {};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    merge_parts(const __grid_constant__ Arguments at) {
  begin();
  const int row = blockIdx.x * WARPS + (threadIdx.x >> 5), head = row / G, h = row % G;
  wait_for_all();
  if (head >= at.units) return;
  for (int c = (threadIdx.x & 31) * 4; c < CHANNELS; c += 128) merge_row<4>(at, head, h, c);
}
