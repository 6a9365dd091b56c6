// Quantizes 16-bit or float K and V along tokens and writes their records (layout.py), scales and
// zero-points: a launch for the bounds of each channel, one for the codes.
//
// Both read K and V. What the first one has read last, the second one reads first, while L2 has it.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V; D: padded to a multiple of 32 in the codes
//   KB, VB    bits per code (1, 2, 4, 8); TILES: tiles of 64 tokens per record
//   INPUT     type of K and V, 0: fp16, 1: bf16, 2: fp32; ALIGN: bytes that they are aligned to
//   THREADS (of span_bounds), WARPS (of span_pack), ARGUMENTS_BYTES, WARP_SHARED_BYTES
#define D ((CHANNELS + 31) / 32 * 32)
#include "pack_device.cuh"
#include "pack_levels.cuh"
#include "pack_tile.cuh"
#include "pack_words.cuh"
#include "span_packer.cuh"
#include "span_bounds.cuh"

struct Arguments {
  Dense key, value;
  const long long* index;                    // [batch, taken] tokens of K and V
  const long long* offsets;                  // [batch, blocks + 1] of the blocks, in taken tokens
  const int* first_records;                  // [batch, blocks]
  u16 *k_scale, *k_zero, *v_scale, *v_zero;  // [batch * kv_heads, blocks, CHANNELS]
  char* records;                             // [batch * kv_heads, records_per_head, RECORD_BYTES]
  float* partial;  // [2 * batch * kv_heads * blocks, splits, 2, CHANNELS], if splits > 1
  int* counters;   // [2 * batch * kv_heads * blocks], zero before and after
  int kv_heads, taken, blocks, records_per_head, splits;
  float k_shrink, v_shrink;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

#define K_TILE_BYTES (64 * D * KB / 8)
#define V_TILE_BYTES (64 * D * VB / 8)
#define RECORD_BYTES (TILES * (K_TILE_BYTES + V_TILE_BYTES))
#define RECORD_TOKENS (TILES * 64)
// Of a warp: its tile of elements, its words, its levels.
#define WORDS_BYTES (K_TILE_BYTES > V_TILE_BYTES ? K_TILE_BYTES : V_TILE_BYTES)
#define WARP_BYTES (TILE_BYTES + WORDS_BYTES + 12 * D)
static_assert(WARP_BYTES == WARP_SHARED_BYTES, "the host's shared memory differs");

__device__ __forceinline__ const char* head_of(const Dense& x, int head, int kv_heads) {
  return x.data + head / kv_heads * x.batch + head % kv_heads * x.head;
}

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
  const long long place = ((long long)head * at.blocks + block) * CHANNELS + c;
  (is_value ? at.v_scale : at.k_scale)[place] = l.scale_bits;
  (is_value ? at.v_zero : at.k_zero)[place] = l.zero_bits;
}

// The block of tokens that a record belongs to; -1: none.
__device__ __forceinline__ int block_of(const Arguments& at, int sequence, int record, int lane) {
  const long long* edge = at.offsets + (long long)sequence * (at.blocks + 1);
  const int* first = at.first_records + (long long)sequence * at.blocks;
  for (int start = 0; start < at.blocks; start += 32) {
    const int b = start + lane;
    bool mine = false;
    if (b < at.blocks) {
      const int records = (int)((edge[b + 1] - edge[b] + RECORD_TOKENS - 1) / RECORD_TOKENS);
      mine = first[b] <= record && record < first[b] + records;
    }
    const u32 found = __ballot_sync(FULL, mine);
    if (found) return start + __ffs(found) - 1;
  }
  return -1;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    span_pack(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(16) char shared[];
  const int warp = threadIdx.x >> 5, tiles = at.records_per_head * TILES;
  const int per_head = (tiles + WARPS - 1) / WARPS;
  const u32 backwards = gridDim.x - 1 - blockIdx.x, row = backwards / per_head;
  const int tile = (backwards - row * per_head) * WARPS + warp;
  if (tile >= tiles) return;
  const bool is_value = row & 1;
  const int head = row >> 1, sequence = head / at.kv_heads;
  const int record = tile / TILES, within = tile % TILES;
  Job job;
  job.lane = threadIdx.x & 31, job.g = job.lane >> 2, job.t = job.lane & 3;
  job.tile = shared_address(shared) + warp * WARP_BYTES;
  job.words = job.tile + TILE_BYTES, job.levels = job.words + WORDS_BYTES;
  const int block = block_of(at, sequence, record, job.lane);
  job.left = 0;
  if (block >= 0) {
    const long long* edge = at.offsets + (long long)sequence * (at.blocks + 1) + block;
    const int first = at.first_records[(long long)sequence * at.blocks + block];
    const int token = ((record - first) * TILES + within) * 64;
    job.left = (int)(edge[1] - edge[0]) - token;
    job.index = at.index + (long long)sequence * at.taken + edge[0] + token;
    const Dense& from = is_value ? at.value : at.key;
    job.head = head_of(from, head, at.kv_heads), job.stride = from.token;
    const long long place = ((long long)head * at.blocks + block) * CHANNELS;
    load_levels(job, (is_value ? at.v_scale : at.k_scale) + place,
                (is_value ? at.v_zero : at.k_zero) + place);
  }
  char* codes = at.records + ((long long)head * at.records_per_head + record) * RECORD_BYTES;
  if (is_value)
    SpanPacker<1, VB>::run(job, codes + TILES * K_TILE_BYTES + within * V_TILE_BYTES);
  else
    SpanPacker<0, KB>::run(job, codes + within * K_TILE_BYTES);
}
