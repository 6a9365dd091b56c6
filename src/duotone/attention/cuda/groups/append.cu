// Appends the newest token of every sequence to its tail (groups/tail.cuh). Where that token is the
// last one of a page, the page is packed. It is one launch, a block for 32 tokens of K or V of a
// page. All warps share the steps of packing, since the launch takes as long as one page.
//
// Compiled by NVRTC with these macros:
//   CHANNELS, KB, VB, K_ALONG_K, V_ALONG_K, K_GROUP, V_GROUP, K_MAPPING, V_MAPPING, INPUT, WARPS,
//   TILE_SHARED_BYTES, ARGUMENTS_BYTES  as in groups/pack.cu
//   SHARERS     as many as WARPS
//   K_SEPARATE, V_SEPARATE, NORM  0; ALIGN  16
//   TILES       of a page
//   TAIL_PAGES  pages of a sequence that hold its tail
//   OVERLAP     1: the launch begins early, and waits before it reads
#define D CHANNELS
#include "packing/device.cuh"
#include "packing/levels.cuh"
#include "packing/codes.cuh"
#include "packing/tile.cuh"
#include "packing/words.cuh"

struct Arguments {
  const char* from[2];                    // K and V of one token
  long long from_batch[2], from_head[2];  // bytes
  char* pool;                             // [pages, kv_heads, PAGE_BYTES]
  const int* tail_pages;                  // [batch, TAIL_PAGES]
  const int* full;            // [batch] page that becomes full; 0, the page of nobody: none
  const long long* position;  // [batch] of the token; below 0: it is not kept
  int batch, kv_heads;
  float shrink[2], eta[2], rest[2];  // of K and V; rest: 1 - 2 eta
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

#include "groups/packer.cuh"
typedef Packer<0, KB, K_ALONG_K, K_GROUP, K_MAPPING> Keys;
typedef Packer<1, VB, V_ALONG_K, V_GROUP, V_MAPPING> Values;
static_assert(Keys::PARTNERS == 1 && Values::PARTNERS == 1, "a tile has whole groups");

#include "groups/stored.cuh"
#define SHARED_TILE_BYTES (TILE_BYTES + CODE_BYTES(KB > VB ? KB : VB))
static_assert(SHARED_TILE_BYTES == TILE_SHARED_BYTES, "the host's shared memory differs");
#define PAGE_BYTES (TILES * STORED_TILE_BYTES)
#define TOKEN_BYTES (CHANNELS * ELEMENT_BYTES)
#define TAIL_ROWS (PAGE_BYTES / (2 * TOKEN_BYTES))  // of K, and of V, in a page of a head
static_assert(PAGE_BYTES % (2 * TOKEN_BYTES) == 0, "rows follow each other over pages");
#define VECTORS (TOKEN_BYTES / 16)  // of a row
static_assert(VECTORS <= 32, "a lane has one vector of the token");

// K or V of a head's tail, as rows of the pool.
struct Row {
  const int* pages;
  int kv_heads, head, is_value;

  __device__ __forceinline__ int of(long long position) const {
    const u32 slot = (u32)position % (TAIL_PAGES * TAIL_ROWS);
    return (pages[slot / TAIL_ROWS] * kv_heads + head) * (2 * TAIL_ROWS) + is_value * TAIL_ROWS +
           slot % TAIL_ROWS;
  }
};

// Loads tile `tile` of the page that ends with the token at `position`. Lanes of the first warp have
// that token's vectors, since its row may not be written yet.
__device__ __forceinline__ void load_tokens(const Job& job, const Arguments& at, const Row& row,
                                            long long position, int tile, uint4 newest) {
  const int old = row.of(position - (TILES - tile) * TILE + 1 + job.lane);
  copy_tile<true>(job.tile, at.pool, TOKEN_BYTES, old, job.lane, job.part, SHARERS);
  wait_for_copies();
  wait_for_sharers();
  if (tile == TILES - 1 && job.part == 0 && job.lane < VECTORS) {
    const u32 last = job.tile + (TILE - 1) * ROW_BYTES + job.lane * 16;
    store_shared(last, newest.x, newest.y), store_shared(last + 8, newest.z, newest.w);
  }
  wait_for_sharers();
}

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    group_append(const __grid_constant__ Arguments at) {
#if OVERLAP && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  extern __shared__ __align__(16) char shared[];
  Job job;
  job.warp = threadIdx.x >> 5, job.lane = threadIdx.x & 31, job.part = job.warp;
  job.g = job.lane >> 2, job.t = job.lane & 3;
  const int tile = blockIdx.x % TILES, is_value = blockIdx.x / TILES & 1;
  const int row_of_all = blockIdx.x / TILES >> 1, sequence = row_of_all / at.kv_heads;
  const int head = row_of_all - sequence * at.kv_heads, full = at.full[sequence];
  const long long position = at.position[sequence];
  if (position < 0) return;
  const Row row = {at.tail_pages + sequence * TAIL_PAGES, at.kv_heads, head, is_value};
  uint4 newest = {};
  if (tile == TILES - 1 && job.part == 0 && job.lane < VECTORS) {
    const char* from =
        at.from[is_value] + sequence * at.from_batch[is_value] + head * at.from_head[is_value];
    newest = ((const uint4*)from)[job.lane];
    ((uint4*)(at.pool + (long long)row.of(position) * TOKEN_BYTES))[job.lane] = newest;
  }
  if (full <= 0) return;
  job.there = true, job.norm = nullptr;
  job.tile = shared_address(shared);
  job.words = job.tile + TILE_BYTES;
  load_tokens(job, at, row, position, tile, newest);
  char* to =
      at.pool + ((long long)full * at.kv_heads + head) * PAGE_BYTES + tile * STORED_TILE_BYTES;
  job.codes = to + (is_value ? K_OWN_BYTES : 0);
  job.params = to + K_OWN_BYTES + V_OWN_BYTES + (is_value ? K_PARAM_BYTES : 0);
  job.shrink = at.shrink[is_value], job.eta = at.eta[is_value], job.rest = at.rest[is_value];
  is_value ? Values::run(job, nullptr) : Keys::run(job, nullptr);
}
