// Packs 16-bit or float K and V by given levels into packed tiles of classes (classes/layout.py).
// With them go K's parameters where they lie in its tiles. It is one launch, one read, a warp per
// 64 tokens of K or of V.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V; D: padded to a multiple of 32
//   KN4, KN2, KN1, VN4, VN2, VN1, K_TILES, K_SMALL, V_SMALL  as in classes/decode.cu
//   INPUT     type of K and V, 0: fp16, 1: bf16, 2: fp32; ALIGN: bytes that they are aligned to
//   WARPS     of a block
//   ARGUMENTS_BYTES, WARP_SHARED_BYTES  sizes of Arguments and of a warp's memory on the host
#define D ((CHANNELS + 31) / 32 * 32)
#include "packing/device.cuh"
#include "packing/levels.cuh"
#include "packing/tile.cuh"
#include "packing/words.cuh"
#include "classes/widths.cuh"
#include "classes/parts.cuh"

// K or V and the levels of its blocks of tokens, sorted by class.
struct Side {
  Dense x;
  const int* block;            // [batch, tiles] of each tile; -1: it has no token
  const unsigned char* order;  // [batch * kv_heads, blocks, CHANNELS]
  const u16 *scale, *zero;     // [batch * kv_heads, blocks, coded channels]
  long long blocks;
};
struct Arguments {
  Side key, value;
  // Levels that K's codes stand for, zero-points of all channels: fp16, or rows of 8 bits; K_TILES.
  const void *k_scale, *k_zero;
  const int* token;    // [batch, tiles * 64] of K and V, -1: none
  char* packed_tiles;  // [batch * kv_heads, tiles, STORED_TILE_BYTES]
  int kv_heads, tiles;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

// A warp's memory: its tile of elements, its words, its levels.
#define CODE_SLOTS (16 * (Keys::COLUMNS > Values::COLUMNS ? Keys::COLUMNS : Values::COLUMNS))
#define WORDS_BYTES (128 * (Keys::WORDS > Values::WORDS ? Keys::WORDS : Values::WORDS))
#define WARP_BYTES (TILE_BYTES + WORDS_BYTES + 16 * CODE_SLOTS)
static_assert(WARP_BYTES == WARP_SHARED_BYTES, "the host's shared memory differs");
#include "classes/packer.cuh"

#if K_SMALL
typedef unsigned char Parameter;
#else
typedef u16 Parameter;
#endif
// Zero-points by channel, scales and channels by slot; all 0 without tokens (a negative row).
__device__ __forceinline__ void write_parameters(const Arguments& at, long long row, char* tile,
                                                 int lane) {
  const unsigned char* order = at.key.order + row * CHANNELS;
  // Numbers of a row, after its exponent.
  const Parameter* k_zero = (const Parameter*)at.k_zero + row * (CHANNELS + K_SMALL) + K_SMALL;
  const Parameter* k_scale = (const Parameter*)at.k_scale + row * (Keys::CODED + K_SMALL) + K_SMALL;
  Parameter *zeros = (Parameter*)(tile + ZEROS_AT), *scales = (Parameter*)(tile + SCALES_AT);
  for (int rank = lane; rank < D; rank += 32) {
    const bool real = row >= 0 && rank < CHANNELS;
    zeros[real ? order[rank] : rank] = real ? k_zero[rank] : 0;
  }
  for (int slot = lane; slot < 16 * Keys::COLUMNS; slot += 32) {
    const int rank = row < 0 ? -1 : Keys::rank(Keys::once(slot));
    scales[slot] = rank < 0 ? 0 : k_scale[rank];
    tile[CHANNELS_AT + slot] = rank < 0 ? 0 : order[rank];
  }
  if (K_SMALL && lane < 16)
    tile[EXPONENTS_AT + lane] = row < 0 || lane > 1 ? 0 : (char)(lane ? k_zero : k_scale)[-1];
}

template <int VALUE, class C>
__device__ __forceinline__ void pack_side(Job& job, const Side& from, long long row, char* codes) {
  if (row >= 0) load_levels<VALUE, C>(job, from, row);
  job.stride = from.x.token;
  __syncwarp();
  ClassPacker<VALUE, C>::run(job, codes);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    class_pack(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(16) char shared[];
  // Blocks of a head lie together, those of its K before those of its V.
  const u32 per_head = (at.tiles + WARPS - 1) / WARPS, both = blockIdx.x / per_head;
  const int warp = threadIdx.x >> 5, head = both >> 1, sequence = head / at.kv_heads;
  const int tile = (blockIdx.x - both * per_head) * WARPS + warp;
  if (tile >= at.tiles) return;
  const bool is_value = both & 1;
  const Side& from = is_value ? at.value : at.key;
  Job job;
  job.lane = threadIdx.x & 31, job.g = job.lane >> 2, job.t = job.lane & 3;
  job.tile = shared_address(shared) + warp * WARP_BYTES;
  job.words = job.tile + TILE_BYTES, job.levels = job.words + WORDS_BYTES;
  const long long of_sequence = (long long)sequence * at.tiles + tile;
  job.token = at.token + of_sequence * 64;
  job.head = from.x.data + sequence * from.x.batch + head % at.kv_heads * from.x.head;
  const int block = from.block[of_sequence];
  const long long row = block < 0 ? -1 : head * from.blocks + block;
  char* target = at.packed_tiles + ((long long)head * at.tiles + tile) * STORED_TILE_BYTES;
  if (is_value) {
    pack_side<1, Values>(job, from, row, target + VALUES_AT);
  } else {
    if (K_TILES) write_parameters(at, row, target, job.lane);
    pack_side<0, Keys>(job, from, row, target);
  }
}
