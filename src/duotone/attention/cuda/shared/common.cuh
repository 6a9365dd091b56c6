// Shared by the decode kernels: units of work, the ring of packed tiles, merging.
//
// Expects what call.cuh does and D, HEADS, WARPS, STAGES, KEYS and PACKED_TILE_BYTES, and
//   HEADS    q heads with room for them in the sums, G or more
//   PAGED    packed tiles per page, or 0 where a sequence's packed tiles lie in one piece
//   SUB_BLOCKS  of WARPS warps each in a block: 1, 2 or 4 (1 where it is not defined)
//   ONE_RUN  defined where the tokens of a sequence are one block, from packed tile 0 on
//   MERGE    who merges the parts of a kv head. 0: there is one part, the output; 1: the sub-block
//            that ends last. 2: a later launch; 3: this launch, the last one of a call, whose
//            sub-blocks have the last part of a kv head each
#ifndef SUB_BLOCKS
#define SUB_BLOCKS 1
#endif
#include "shared/call.cuh"
#include "shared/merged.cuh"
static_assert(SUB_BLOCKS == 1 || WARPS % 4 == 0, "a sub-block has as many warps in all schedulers");

// A sub-block's share of the work: some packed tiles of one block of tokens of one kv head.
struct Unit {
  int lane, g, t, warp, tid, sub_block;
  int sequence, kv_head, head, part, row, length, first, last;
  const char* source;
#if PAGED
  const int* table;
  int first_packed_tile;
  size_t page_bytes;

  __device__ __forceinline__ const char* at(int packed_tile) const {
    const u32 number = first_packed_tile + packed_tile;
    return source + table[number / PAGED] * page_bytes + number % PAGED * PACKED_TILE_BYTES;
  }
#else
  __device__ __forceinline__ const char* at(int packed_tile) const {
    return source + (size_t)packed_tile * PACKED_TILE_BYTES;
  }
#endif
  // Copies what a pass reads of a packed tile: BYTES of it, from byte FROM on. Kernels whose packed
  // tiles lie in several pieces have a unit of their own that copies those.
  template <int BYTES, int FROM = 0, class Slot>
  __device__ __forceinline__ void copy_packed_tile(int packed_tile, const Slot& slot) const {
    const char* from = at(packed_tile) + FROM;
    slot.template expect<BYTES>();
    slot.template put<BYTES>(0, from);
  }
};

// x, which the compiler so keeps instead of making it anew for every packed tile.
__device__ __forceinline__ u32 pinned(u32 x, int lane) {
  u32 y;
  asm volatile("shfl.sync.idx.b32 %0,%1,%2,0x1f,0xffffffff;" : "=r"(y) : "r"(x), "r"(lane));
  return y;
}
// A scheduler serves its oldest warp first. Of two blocks next to each other one so ends a quarter
// earlier, and the multiprocessor is half empty then. Each sub-block of a block therefore has warps
// of all ages.
__device__ __forceinline__ void find_sub_block(Unit& u) {
  const int tid = threadIdx.x, warp = tid >> 5, scheduler = warp & 3, age = warp >> 2;
  u.sub_block = 0, u.warp = warp;
  if (SUB_BLOCKS > 1) {
    u.sub_block = __shfl_sync(FULL, (age + scheduler) & (SUB_BLOCKS - 1), 0);
    u.warp = __shfl_sync(FULL, age / SUB_BLOCKS * 4 + scheduler, 0);
  }
  u.lane = pinned(tid & 31, tid & 31), u.g = u.lane >> 2, u.t = u.lane & 3;
  u.tid = SUB_BLOCKS > 1 ? u.warp * 32 + u.lane : tid;
}
// A barrier of the threads of a sub-block.
__device__ __forceinline__ void sync_sub_block(const Unit& u) {
  if (SUB_BLOCKS == 1)
    __syncthreads();
  else
    asm volatile("barrier.sync.aligned %0,%1;" ::"r"(u.sub_block + 1), "n"(WARPS * 32) : "memory");
}
// Tokens of a unit; the last three numbers are loaded, before their use.
struct UnitTokens {
  int block, split, from, to, first_packed_tile;
};
// x / splits: a division would cost as much as a tile of keys.
__device__ __forceinline__ int divided(const Call& at, int x) {
  return at.splits == 1 ? x : __umulhi(x, at.splits_inverse);
}
// Packed tiles of one of the splits of a block of tokens, the larger ones first.
struct Share {
  int first, last;
};
__device__ __forceinline__ Share share_of(const Call& at, int packed_tiles, int split) {
  const int each = divided(at, packed_tiles), more = packed_tiles - each * at.splits;
  const int first = split * each + min(split, more);
  return {first, first + each + (split < more)};
}
__device__ __forceinline__ UnitTokens find_tokens(const Call& at, Unit& u) {
  u.part = blockIdx.x, u.sequence = blockIdx.z, u.kv_head = blockIdx.y * SUB_BLOCKS + u.sub_block;
  u.head = u.sequence * at.kv_heads + u.kv_head;
  UnitTokens tokens;
  tokens.block = divided(at, u.part);
  tokens.split = u.part - tokens.block * at.splits;
  u.row = u.head * at.blocks + tokens.block;
#ifdef ONE_RUN
  tokens.from = 0, tokens.to = (int)at.tokens[u.sequence];
  tokens.first_packed_tile = 0;
#else
  const long long* edge = at.tokens + (size_t)u.sequence * (at.blocks + 1) + tokens.block;
  tokens.from = (int)edge[0], tokens.to = (int)edge[1];
  tokens.first_packed_tile = at.first_packed_tiles[u.sequence * at.blocks + tokens.block];
#endif
  return tokens;
}
__device__ __forceinline__ void find_packed_tiles(const Call& at, Unit& u,
                                                  const UnitTokens& tokens) {
  u.length = tokens.to - tokens.from;
  const int packed_tiles = (u.length + KEYS - 1) / KEYS;
  const Share share = share_of(at, packed_tiles, tokens.split);
  u.first = share.first, u.last = share.last;
#if PAGED
  u.table = at.pages + (size_t)u.sequence * at.pages_per_sequence;
  u.first_packed_tile = tokens.first_packed_tile;
  u.page_bytes = (size_t)at.kv_heads * PAGED * PACKED_TILE_BYTES;
  u.source = at.packed_tiles + (size_t)u.kv_head * PAGED * PACKED_TILE_BYTES;
#else
  u.source =
      at.packed_tiles + ((size_t)u.head * at.packed_tiles_per_head + tokens.first_packed_tile) *
                            (size_t)PACKED_TILE_BYTES;
#endif
}
// Packed tiles of a unit if its sequence fills all the room: for loads before lengths are known.
// None where packed tiles lie in pages or after those of other blocks.
__device__ __forceinline__ void guess_packed_tiles(const Call& at, Unit& u,
                                                   const UnitTokens& tokens) {
  u.first = u.last = 0;
#if !PAGED
  if (at.blocks > 1) return;
  const Share share = share_of(at, at.packed_tiles_per_head, tokens.split);
  u.first = share.first, u.last = share.last;
  u.source = at.packed_tiles + (size_t)u.head * at.packed_tiles_per_head * PACKED_TILE_BYTES;
#endif
}
__device__ __forceinline__ void find_unit(const Call& at, Unit& u) {
  find_sub_block(u);
  find_packed_tiles(at, u, find_tokens(at, u));
}

#include "shared/ring.cuh"

// Counts a part after all that its block wrote, and before what it reads.
__device__ __forceinline__ int count_part(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0,[%1],1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}
// True in the sub-block that finishes a kv head last. One thread orders what all of them wrote,
// which the barriers before and after it let it: a fence of every thread takes longer.
__device__ __forceinline__ bool arrive_last(const Call& at, const Unit& u, int* flag) {
  sync_sub_block(u);
  if (u.tid == 0) {
    const bool last = count_part(at.counters + 2 * u.head) == at.all_parts - 1;
    if (last) at.counters[2 * u.head] = at.counters[2 * u.head + 1] = 0;
    *flag = last;
  }
  sync_sub_block(u);
  return *flag;
}

// Where a warp puts its sums once its ring is free: rows of D + 8 floats.
__device__ __forceinline__ float* sums_of(char* shared, int w) {
  return (float*)(shared + w * (STAGES * SLOT_BYTES));
}

// Rounds in which a thread merges a sub-block's sums: four channels at a time of all q heads.
#define ROUNDS ((G * CHANNELS + WARPS * 128 - 1) / (WARPS * 128))

// The parts that other launches have left of those channels.
struct Earlier {
  Merged parts[ROUNDS];

  // All rounds load two parts each before any of them waits.
  __device__ __forceinline__ void read(const Call& at, const Unit& u) {
    const size_t row = (size_t)u.head * at.all_parts * G;
    for (int s = 0; s < at.first_part; s += 2)
#pragma unroll
      for (int round = 0; round < ROUNDS; round++) {
        const int i = (round * WARPS * 32 + u.tid) * 4;
        if (i < G * CHANNELS)
          merge<2>(parts[round], at.weights + row + s * G + i / CHANNELS,
                   at.partial + (row + s * G) * CHANNELS + i, at.first_part - s);
      }
  }
};

// Merges the sums of a sub-block's warps: the output, or a part of it where there are several.
// earlier: what else is in the output, with MERGE 3. ml: maximum and weight of each warp and head.
// weight_top: log2 of what a weight of 1 stands for under the maximum.
// value(c, l, sum): a column of V from its sum.
template <class F>
__device__ __forceinline__ void merge_warps(const Call& at, const Unit& u, Earlier& earlier,
                                            char* shared, const float (*ml)[HEADS][2],
                                            float weight_top, F value) {
  sync_sub_block(u);
  const size_t part = (size_t)u.head * at.all_parts + at.first_part + u.part;
#pragma unroll(MERGE == 3 ? ROUNDS : 4)
  for (int round = 0; round < ROUNDS; round++) {
    const int i = (round * WARPS * 32 + u.tid) * 4, h = i / CHANNELS, c = i % CHANNELS;
    if (i >= G * CHANNELS) break;
    float m = -1e30f, l = 0.f, sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) m = fmaxf(m, ml[w][h][0]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float z = exp2_fast(ml[w][h][0] - m);
      const float4 x = *(const float4*)(sums_of(shared, w) + h * (D + 8) + c);
      l = fmaf(z, ml[w][h][1], l);
      sum[0] = fmaf(z, x.x, sum[0]), sum[1] = fmaf(z, x.y, sum[1]), sum[2] = fmaf(z, x.z, sum[2]),
      sum[3] = fmaf(z, x.w, sum[3]);
    }
    m -= weight_top;
#pragma unroll
    for (int j = 0; j < 4; j++)
      // Scales of an empty block may be anything; a weight that is not a number shall be seen.
      sum[j] = l == 0.f ? 0.f : value(c + j, l, sum[j]);
    if (MERGE == 0) {
      write_out(at, u.head, h, c, m, l, sum);
    } else if (MERGE == 3) {
      Merged& all = earlier.parts[round];
      all.raise(fmaxf(all.m, m));
      all.add(make_float2(m, l), make_float4(sum[0], sum[1], sum[2], sum[3]));
      write_out(at, u.head, h, c, all.m, all.l, all.sum);
    } else {
      __stcg((float4*)(at.partial + (part * G + h) * CHANNELS + c),
             make_float4(sum[0], sum[1], sum[2], sum[3]));
      if (c == 0) __stcg(at.weights + part * G + h, make_float2(m, l));
    }
  }
}

// Merges all parts of a kv head, in the sub-block that ends last, and writes the output.
__device__ __forceinline__ void merge_parts(const Call& at, const Unit& u) {
  for (int i = u.tid * 4; i < G * CHANNELS; i += WARPS * 128)
    merge_row<16>(at, u.head, i / CHANNELS, i % CHANNELS);
}

// All that a unit owes the output.
template <class F>
__device__ __forceinline__ void finish(const Call& at, const Unit& u, char* shared,
                                       const float (*ml)[HEADS][2], int* flag, float weight_top,
                                       F value) {
  Earlier earlier;
  if (MERGE == 3) {
    wait_for_all();
    earlier.read(at, u);
  }
  merge_warps(at, u, earlier, shared, ml, weight_top, value);
  if (MERGE == 1 && arrive_last(at, u, flag)) merge_parts(at, u);
  if (MERGE != 3) wait_for_all();
}
