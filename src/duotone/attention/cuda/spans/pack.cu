// Quantizes 16-bit or float K and V along tokens and writes packed tiles (spans/layout.py), scales
// and zero-points. A launch finds the bounds of each channel, another one writes the codes.
//
// Both read K and V. What the first one has read last, the second one reads first, while L2 has it.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V; D: padded to a multiple of 32 in the codes
//   KB, VB    bits per code, as layout.py has them; TILES: tiles of 64 tokens per packed tile
//   INPUT     type of K and V, 0: fp16, 1: bf16, 2: fp32; ALIGN: bytes that they are aligned to
//   THREADS   of a block of span_bounds; WARPS: of a block of span_pack
//   ARGUMENTS_BYTES, WARP_SHARED_BYTES  sizes of Arguments and of a warp's memory on the host
#define D ((CHANNELS + 31) / 32 * 32)
#define SHARERS 1
#include "packing/device.cuh"
#include "packing/levels.cuh"
#include "packing/codes.cuh"
#include "packing/tile.cuh"
#include "packing/words.cuh"
#include "spans/pack_call.cuh"
#include "spans/steps.cuh"
#include "spans/packer.cuh"
#include "spans/bounds.cuh"

// A warp's memory: its tile of elements, its words, its levels.
#define WORDS_BYTES ((K_TILE_BYTES > V_TILE_BYTES ? K_TILE_BYTES : V_TILE_BYTES) / 2)
#define WARP_BYTES (TILE_BYTES + WORDS_BYTES + 16 * D)
static_assert(WARP_BYTES == WARP_SHARED_BYTES, "the host's shared memory differs");

extern "C" __global__ void __launch_bounds__(THREADS)
    span_bounds(const __grid_constant__ Arguments at) {
  __shared__ float seen[2][TOGETHER][CHANNELS];
  __shared__ int last;
  const int row = blockIdx.x / at.splits, split = blockIdx.x - row * at.splits;
  const int block = row / 2 % at.blocks, head = row / 2 / at.blocks;
  const bool is_value = row & 1;
  const int sequence = head / at.kv_heads, c = threadIdx.x;
  const long long* edge = at.offsets + (long long)sequence * (at.blocks + 1) + block;
  const int length = (int)(edge[1] - edge[0]);
  const Dense& from = is_value ? at.value : at.key;
  bound_tokens(seen, head_of(from, head, at.kv_heads), from.token,
               at.index + (long long)sequence * at.taken + edge[0],
               (int)((long long)length * split / at.splits),
               (int)((long long)length * (split + 1) / at.splits));
  __syncthreads();
  Bounds b = {INFINITE, -INFINITE, 0.f};
  if (c < CHANNELS)
    for (int r = 0; r < TOGETHER; r++)
      b.low = least(b.low, seen[0][r][c]), b.high = greatest(b.high, seen[1][r][c]);
  if (at.splits > 1) {  // the last split of a block merges all of them
    float* partial = at.partial + (long long)row * at.splits * 2 * CHANNELS + c;
    if (c < CHANNELS) {
      __stcg(partial + split * 2 * CHANNELS, b.low);
      __stcg(partial + (split * 2 + 1) * CHANNELS, b.high);
    }
    __threadfence();
    __syncthreads();
    if (c == 0) {
      last = atomicAdd(at.counters + row, 1) == at.splits - 1;
      if (last) at.counters[row] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    if (c < CHANNELS)
      for (int s = 0; s < at.splits; s++) {
        b.low = least(b.low, __ldcg(partial + s * 2 * CHANNELS));
        b.high = greatest(b.high, __ldcg(partial + (s * 2 + 1) * CHANNELS));
      }
  }
  if (c >= CHANNELS) return;
  if (length == 0) b.low = b.high = 0.f;
  Levels l;
  if (is_value)
    l.asymmetric<VB>(b, at.v_shrink);
  else
    l.asymmetric<KB>(b, at.k_shrink);
  const long long params = ((long long)head * at.blocks + block) * CHANNELS + c;
  (is_value ? at.v_scale : at.k_scale)[params] = l.scale_bits;
  (is_value ? at.v_zero : at.k_zero)[params] = l.zero_bits;
}

// The block of tokens that a packed tile belongs to; -1: none.
__device__ __forceinline__ int block_of(const Arguments& at, int sequence, int packed_tile,
                                        int lane) {
  const long long* edge = at.offsets + (long long)sequence * (at.blocks + 1);
  const int* first = at.first_packed_tiles + (long long)sequence * at.blocks;
  for (int start = 0; start < at.blocks; start += 32) {
    const int b = start + lane;
    bool mine = false;
    if (b < at.blocks) {
      const int packed_tiles =
          (int)((edge[b + 1] - edge[b] + PACKED_TILE_TOKENS - 1) / PACKED_TILE_TOKENS);
      mine = first[b] <= packed_tile && packed_tile < first[b] + packed_tiles;
    }
    const u32 found = __ballot_sync(FULL, mine);
    if (found) return start + __ffs(found) - 1;
  }
  return -1;
}

// Where a warp's 64 tokens come from.
struct Source {
  const char* head;
  int stride;
  const long long* index;  // of the tile's first token
  int left;                // tokens from there to the end of the block
};

// Levels of a block of tokens from its rows of parameters.
template <int VALUE, int BITS>
__device__ __forceinline__ void load_levels(const Job& job, const u16* scale, const u16* zero) {
  for (int c = job.lane; c < D; c += 32) {
    Levels l = {};
    if (c < CHANNELS) l.read(__ldg(scale + c), __ldg(zero + c));
#pragma unroll
    for (int part = 0; part < Steps<VALUE, BITS>::LEVEL_PARTS; part++)
      Steps<VALUE, BITS>::store_levels(job.levels, l, c, part);
  }
}

// 64 tokens, 32 at a time.
template <int VALUE, int BITS>
__device__ __forceinline__ void pack_tile(const Job& job, const Source& from, char* codes) {
  for (int half = 0; half < 2; half++) {
    const int left = from.left - TILE * half;
    __syncwarp();  // all lanes are done with what was there
    if (left > 0) {
      const int position = job.lane < left ? (int)from.index[TILE * half + job.lane] : -1;
      load_tile(job.tile, from.head, from.stride, position, job.lane);
    }
    SpanPacker<VALUE, BITS>::pack(job, half, left, codes);
  }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    span_pack(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(16) char shared[];
  const int warp = threadIdx.x >> 5, tiles = at.packed_tiles_per_head * TILES;
  const int per_head = (tiles + WARPS - 1) / WARPS;
  const u32 backwards = gridDim.x - 1 - blockIdx.x, row = backwards / per_head;
  const int tile = (backwards - row * per_head) * WARPS + warp;
  if (tile >= tiles) return;
  const bool is_value = row & 1;
  const int head = row >> 1, sequence = head / at.kv_heads;
  const int packed_tile = tile / TILES, within = tile % TILES;
  Job job;
  job.set_lane(threadIdx.x & 31), job.first = 0;
  job.tile = shared_address(shared) + warp * WARP_BYTES;
  job.words = job.tile + TILE_BYTES, job.levels = job.words + WORDS_BYTES;
  Source from = {};
  const int block = block_of(at, sequence, packed_tile, job.lane);
  if (block >= 0) {
    const long long* edge = at.offsets + (long long)sequence * (at.blocks + 1) + block;
    const int first = at.first_packed_tiles[(long long)sequence * at.blocks + block];
    const int token = ((packed_tile - first) * TILES + within) * 64;
    from.left = (int)(edge[1] - edge[0]) - token;
    from.index = at.index + (long long)sequence * at.taken + edge[0] + token;
    const Dense& states = is_value ? at.value : at.key;
    from.head = head_of(states, head, at.kv_heads), from.stride = states.token;
    const long long params = ((long long)head * at.blocks + block) * CHANNELS;
    if (is_value)
      load_levels<1, VB>(job, at.v_scale + params, at.v_zero + params);
    else
      load_levels<0, KB>(job, at.k_scale + params, at.k_zero + params);
  }
  char* codes = at.packed_tiles +
                ((long long)head * at.packed_tiles_per_head + packed_tile) * PACKED_TILE_BYTES;
  if (is_value)
    pack_tile<1, VB>(job, from, codes + TILES * K_TILE_BYTES + within * V_TILE_BYTES);
  else
    pack_tile<0, KB>(job, from, codes + within * K_TILE_BYTES);
}
