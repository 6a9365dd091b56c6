// Quantizes K and V as spans/pack.cu does, bit for bit, in one launch that reads them once. A block
// of tokens must fit the shared memory of a cluster.
//
// A cluster packs K or V of one block of tokens of a head. Each of its thread blocks holds every
// CLUSTER-th 32 tokens, for which it has a warp or a few. They pass each other their bounds and
// write the codes of what they hold. Shared memory of a thread block:
//   | bounds that warps saw, then their words | levels | tiles of 32 tokens |
//
// Compiled by NVRTC with the macros of spans/pack.cu but THREADS and WARP_SHARED_BYTES, and
//   CLUSTER  thread blocks of a cluster; 1: no cluster, for any device
//   WARPS    of a thread block; SHARERS: of them, of 32 tokens
//   BEFORE_TILES_BYTES  size of the memory before tiles on the host
#define D ((CHANNELS + 31) / 32 * 32)
#include "packing/device.cuh"
#include "packing/levels.cuh"
#include "packing/codes.cuh"
#include "packing/tile.cuh"
#include "packing/words.cuh"
#include "spans/pack_call.cuh"
#include "spans/steps.cuh"
#include "spans/packer.cuh"
#include "spans/agree.cuh"
#include "spans/held.cuh"

// Levels and codes of what this thread block holds.
template <int VALUE, int BITS>
__device__ __forceinline__ void pack_held(const Arguments& at, const Share& s, u32 memory,
                                          const Agreement& all) {
  const long long params = ((long long)s.head * at.blocks + s.block) * CHANNELS;
  u16* scale = (VALUE ? at.v_scale : at.k_scale) + params;
  u16* zero = (VALUE ? at.v_zero : at.k_zero) + params;
  Job job;
  job.set_lane(threadIdx.x & 31), job.first = s.part * OWN;
  job.words = memory + s.first_slot * SLOT_BYTES, job.levels = memory + SLOTS * SLOT_BYTES;
  all.wait_for_all();
  for (int n = threadIdx.x; n < D * Steps<VALUE, BITS>::LEVEL_PARTS; n += WARPS * 32) {
    const int c = n % D;
    Levels l = {};
    if (c < CHANNELS) {
      l.asymmetric<BITS>(all.agreed(c, s.length), VALUE ? at.v_shrink : at.k_shrink);
      if (s.rank == 0 && n < D) scale[c] = l.scale_bits, zero[c] = l.zero_bits;
    }
    Steps<VALUE, BITS>::store_levels(job.levels, l, c, n / D);
  }
  __syncthreads();
  for (int slot = s.first_slot; s.half(slot) < s.halves; slot += SLOTS) {
    const int half = s.half(slot), packed_tile = s.first_packed_tile + half / (2 * TILES);
    char* codes = at.packed_tiles +
                  ((long long)s.head * at.packed_tiles_per_head + packed_tile) * PACKED_TILE_BYTES;
    const int within = half / 2 % TILES;
    job.tile = memory + BEFORE_TILES + slot * TILE_BYTES;
    SpanPacker<VALUE, BITS>::pack(
        job, half % 2, s.length - half * TILE,
        codes + (VALUE ? TILES * K_TILE_BYTES + within * V_TILE_BYTES : within * K_TILE_BYTES));
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    span_pack_once(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(16) char shared[];
  __align__(16) __shared__ Pair received[CLUSTER][CHANNELS];
  __shared__ u64 arrived;
  const Agreement all = {received, &arrived};
  const u32 memory = shared_address(shared);
  Share s;
  all.listen();
  s.find(at);
  load_share(at, s, memory + BEFORE_TILES);
  bound_share(s, memory, all);
  if (s.is_value)
    pack_held<1, VB>(at, s, memory, all);
  else
    pack_held<0, KB>(at, s, memory, all);
}
