// Quantizes 16-bit or float K and V and writes packed tiles of groups (groups/layout.py). It is one
// launch, one read, a warp or two per 32 tokens of K or of V.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V; D: padded to a multiple of 32 in the codes
//   KB, VB, K_ALONG_K, V_ALONG_K, K_GROUP, V_GROUP  as in groups/decode.cu
//   K_SEPARATE, V_SEPARATE  1: codes go to a buffer of their own, or nowhere
//   K_MAPPING, V_MAPPING  see groups/packer.cuh
//   INPUT     type of K and V, 0: fp16, 1: bf16, 2: fp32; ALIGN: bytes that they are aligned to
//   NORM      type of the key norm, 0: none, 1: fp16, 2: bf16, 3: fp32
//   WARPS     of a block; SHARERS: of them, of 32 tokens
//   PAGED     tiles of a page, where tiles go to pages of a pool by number; otherwise 0
//   ARGUMENTS_BYTES, TILE_SHARED_BYTES  sizes of Arguments and of a tile's memory on the host
#define D ((CHANNELS + 31) / 32 * 32)
#include "packing/device.cuh"
#include "packing/levels.cuh"
#include "packing/codes.cuh"
#include "packing/tile.cuh"
#include "packing/words.cuh"

// Bits of `overflow`.
#define SCALE_TOO_LARGE 1
#define NO_ROOM 2

struct Arguments {
  Dense key, value;
  const char* norm;        // [batch, kv_heads, CHANNELS], or null
  const long long* index;  // [batch, tiles_given * 32]
  const long long* tiles;  // [batch] how many of them are real
  const long long* where;  // [batch] tile of a head at which they start
  char* data;              // [batch * kv_heads, room, tile_bytes]
  char* codes[2];  // of K and V, where stored separately: [batch * kv_heads, codes_room, bytes];
                   // null where another layer keeps them
  int* overflow;
  const int* pages;  // where PAGED; nothing is written to page 0 and below
  int kv_heads, tiles_given, room, codes_room[2];
  float shrink[2], eta[2], rest[2];  // of K and V; rest: 1 - 2 eta
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

#if NORM
#define NORM_BYTES (NORM == 3 ? 4 : 2)
__device__ __forceinline__ float load_norm(const char* norm, int channel) {
#if NORM == 3
  return __ldg((const float*)norm + channel);
#else
  const u16 x = __ldg((const u16*)norm + channel);
  return NORM == 1 ? half_to_float(x) : __uint_as_float((u32)x << 16);
#endif
}
#else
#define NORM_BYTES 0
#endif

#include "groups/packer.cuh"
typedef Packer<0, KB, K_ALONG_K, K_GROUP, K_MAPPING> Keys;
typedef Packer<1, VB, V_ALONG_K, V_GROUP, V_MAPPING> Values;

#include "groups/stored.cuh"
// Memory of the warps that share a tile: its elements, then their words.
#define TILES_OF_BLOCK (WARPS / SHARERS)
#define SHARED_TILE_BYTES (TILE_BYTES + CODE_BYTES(KB > VB ? KB : VB))
static_assert(SHARED_TILE_BYTES == TILE_SHARED_BYTES, "the host's shared memory differs");

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    group_pack(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(16) char shared[];
  __shared__ float seen[Keys::PARTNERS + Values::PARTNERS > 2 ? WARPS : 1][2][D];
  // Blocks of a head lie together, those of its K before those of its V.
  const u32 blocks = (at.tiles_given + TILES_OF_BLOCK - 1) / TILES_OF_BLOCK,
            row = blockIdx.x / blocks;
  const bool is_value = row & 1;
  // A division is some hundred cycles before the first load: none where there is one sequence.
  const int head = row >> 1, sequence = head < at.kv_heads ? 0 : head / at.kv_heads;
  Job job;
  job.warp = threadIdx.x >> 5, job.lane = threadIdx.x & 31, job.part = job.warp % SHARERS;
  job.g = job.lane >> 2, job.t = job.lane & 3;
  const int slot = job.warp / SHARERS, tile = (blockIdx.x - row * blocks) * TILES_OF_BLOCK + slot;
  job.tile = shared_address(shared) + slot * SHARED_TILE_BYTES, job.words = job.tile + TILE_BYTES;
  // Loaded together with what says whether they are real: the tile waits for memory once less.
  // Volatile: the load stands here.
  const long long* index = at.index + (long long)sequence * at.tiles_given * TILE;
  const int position =
      *(const volatile int*)(index + min(tile, at.tiles_given - 1) * TILE + job.lane);
#if PAGED
  const int page = tile < at.tiles_given ? at.pages[tile / PAGED] : 0;
  job.there = page > 0;
  const long long target = ((long long)page * at.kv_heads + head) * PAGED + tile % PAGED;
#else
  job.there = tile < at.tiles_given && tile < at.tiles[sequence];
  const long long target = at.where[sequence] + tile;
  if (job.there && (target < 0 || target >= at.room)) {
    job.there = false;
    if (!at.overflow) __trap();
    if (job.lane == 0) atomicOr(at.overflow, NO_ROOM);
  }
#endif
  if (job.there) {
    const Dense& from = is_value ? at.value : at.key;
    const char* states =
        from.data + sequence * from.batch + (head - sequence * at.kv_heads) * from.head;
    copy_tile<true>(job.tile, states, from.token, position, job.lane, job.part, SHARERS);
    wait_for_copies();
  }
  wait_for_sharers();
  const long long first = PAGED ? 0 : (long long)head * at.room;
  char* packed_tile = at.data + (first + target) * STORED_TILE_BYTES;
  job.codes = packed_tile + (is_value ? K_OWN_BYTES : 0);
#if K_SEPARATE || V_SEPARATE
  if (is_value ? V_SEPARATE : K_SEPARATE) {
    const long long row_of_codes = (long long)head * at.codes_room[is_value] + target;
    char* codes = at.codes[is_value];
    job.codes =
        codes ? codes + row_of_codes * (is_value ? CODE_BYTES(VB) : CODE_BYTES(KB)) : nullptr;
  }
#endif
  job.params = packed_tile + K_OWN_BYTES + V_OWN_BYTES + (is_value ? K_PARAM_BYTES : 0);
  job.norm = at.norm + (long long)head * CHANNELS * NORM_BYTES;
  job.shrink = at.shrink[is_value], job.eta = at.eta[is_value], job.rest = at.rest[is_value];
  const bool fits = is_value ? Values::run(job, seen) : Keys::run(job, seen);
  if (!fits && at.overflow) atomicOr(at.overflow, SCALE_TOO_LARGE);
}
