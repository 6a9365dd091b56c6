// What the decode kernels share: the ring of records, units of work, merging.
//
// Expects what call.cuh does and D, HEADS, WARPS, STAGES, KEYS and RECORD_BYTES, and
//   HEADS    q heads with room for them in the sums, G or more
//   PAGED    records per page, or 0 where a sequence's records lie in one piece
//   TEAMS    of WARPS warps each in a block: 1, 2 or 4 (1 where it is not defined)
//   ONE_RUN  defined where the tokens of a sequence are one block, from record 0 on
//   MERGE    0: kv heads have one part, the output; 1: the team that ends last merges all parts of
//            a kv head; 2: a later launch does; 3: this one does, the last of a call, whose teams
//            have the last part of a kv head each
#ifndef TEAMS
#define TEAMS 1
#endif
#include "shared/call.cuh"
#include "shared/merged.cuh"
static_assert(TEAMS == 1 || WARPS % 4 == 0, "a team has as many warps in all schedulers");

// A team's share of the work: some records of one block of tokens of one kv head.
struct Unit {
  int lane, g, t, warp, tid, team;
  int sequence, kv_head, head, part, row, length, first, last;
  const char* source;
#if PAGED
  const int* table;
  int first_record;
  size_t page_bytes;

  __device__ __forceinline__ const char* at(int record) const {
    const u32 place = first_record + record;
    return source + table[place / PAGED] * page_bytes + place % PAGED * RECORD_BYTES;
  }
#else
  __device__ __forceinline__ const char* at(int record) const {
    return source + (size_t)record * RECORD_BYTES;
  }
#endif
  // Copies what a pass reads of a record: BYTES of it, from byte FROM on. Kernels whose records lie
  // in several pieces have a unit of their own that copies those.
  template <int BYTES, int FROM = 0, class Slot>
  __device__ __forceinline__ void copy_record(int record, const Slot& slot) const {
    const char* from = at(record) + FROM;
    slot.template expect<BYTES>();
    slot.template put<BYTES>(0, from);
  }
};

// The same, but the compiler keeps it instead of making it anew for every record.
__device__ __forceinline__ u32 pinned(u32 x, int lane) {
  u32 y;
  asm volatile("shfl.sync.idx.b32 %0,%1,%2,0x1f,0xffffffff;" : "=r"(y) : "r"(x), "r"(lane));
  return y;
}
// A scheduler serves its oldest warp first. Blocks next to each other so end a quarter apart, and a
// multiprocessor is half empty meanwhile; the warps of a block's teams are of all ages.
__device__ __forceinline__ void find_team(Unit& u) {
  const int tid = threadIdx.x, warp = tid >> 5, scheduler = warp & 3, age = warp >> 2;
  u.team = 0, u.warp = warp;
  if (TEAMS > 1) {
    u.team = __shfl_sync(FULL, (age + scheduler) & (TEAMS - 1), 0);
    u.warp = __shfl_sync(FULL, age / TEAMS * 4 + scheduler, 0);
  }
  u.lane = pinned(tid & 31, tid & 31), u.g = u.lane >> 2, u.t = u.lane & 3;
  u.tid = TEAMS > 1 ? u.warp * 32 + u.lane : tid;
}
// A barrier of the threads of a team.
__device__ __forceinline__ void sync_team(const Unit& u) {
  if (TEAMS == 1)
    __syncthreads();
  else
    asm volatile("barrier.sync.aligned %0,%1;" ::"r"(u.team + 1), "n"(WARPS * 32) : "memory");
}
// Which tokens a unit has, the last three numbers as asked for, ahead of their use.
struct Place {
  int block, split, from, to, first_record;
};
// x / splits: a division would cost as much as a tile of keys.
__device__ __forceinline__ int divided(const Call& at, int x) {
  return at.splits == 1 ? x : __umulhi(x, at.splits_inverse);
}
// Records of one of the splits of a block of tokens, the larger ones first.
struct Share {
  int first, last;
};
__device__ __forceinline__ Share share_of(const Call& at, int records, int split) {
  const int each = divided(at, records), more = records - each * at.splits;
  const int first = split * each + min(split, more);
  return {first, first + each + (split < more)};
}
__device__ __forceinline__ Place find_place(const Call& at, Unit& u) {
  u.part = blockIdx.x, u.sequence = blockIdx.z, u.kv_head = blockIdx.y * TEAMS + u.team;
  u.head = u.sequence * at.kv_heads + u.kv_head;
  Place place;
  place.block = divided(at, u.part);
  place.split = u.part - place.block * at.splits;
  u.row = u.head * at.blocks + place.block;
#ifdef ONE_RUN
  place.from = 0, place.to = (int)at.tokens[u.sequence];
  place.first_record = 0;
#else
  const long long* edge = at.tokens + (size_t)u.sequence * (at.blocks + 1) + place.block;
  place.from = (int)edge[0], place.to = (int)edge[1];
  place.first_record = at.first_records[u.sequence * at.blocks + place.block];
#endif
  return place;
}
__device__ __forceinline__ void find_records(const Call& at, Unit& u, const Place& place) {
  u.length = place.to - place.from;
  const int records = (u.length + KEYS - 1) / KEYS;
  const Share share = share_of(at, records, place.split);
  u.first = share.first, u.last = share.last;
#if PAGED
  u.table = at.pages + (size_t)u.sequence * at.pages_per_sequence;
  u.first_record = place.first_record;
  u.page_bytes = (size_t)at.kv_heads * PAGED * RECORD_BYTES;
  u.source = at.records + (size_t)u.kv_head * PAGED * RECORD_BYTES;
#else
  u.source = at.records +
             ((size_t)u.head * at.records_per_head + place.first_record) * (size_t)RECORD_BYTES;
#endif
}
// The records that a unit has if its sequence fills all the room: for who asks before lengths are
// known. None where records lie in pages or behind those of other blocks.
__device__ __forceinline__ void guess_records(const Call& at, Unit& u, const Place& place) {
  u.first = u.last = 0;
#if !PAGED
  if (at.blocks > 1) return;
  const Share share = share_of(at, at.records_per_head, place.split);
  u.first = share.first, u.last = share.last;
  u.source = at.records + (size_t)u.head * at.records_per_head * RECORD_BYTES;
#endif
}
__device__ __forceinline__ void find_unit(const Call& at, Unit& u) {
  find_team(u);
  find_records(at, u, find_place(at, u));
}

#include "shared/ring.cuh"

// Counts a part behind all that its block wrote, and before what it reads.
__device__ __forceinline__ int count_part(int* counter) {
  int before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0,[%1],1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}
// True in the team that finishes a kv head last. One thread orders what all of them wrote, which
// the barriers before and behind it let it: a fence of every thread takes longer.
__device__ __forceinline__ bool arrive_last(const Call& at, const Unit& u, int* flag) {
  sync_team(u);
  if (u.tid == 0) {
    const bool last = count_part(at.counters + 2 * u.head) == at.all_parts - 1;
    if (last) at.counters[2 * u.head] = at.counters[2 * u.head + 1] = 0;
    *flag = last;
  }
  sync_team(u);
  return *flag;
}

// Where a warp puts its sums once its ring is free: rows of D + 8 floats.
__device__ __forceinline__ float* sums_of(char* shared, int w) {
  return (float*)(shared + w * (STAGES * SLOT_BYTES));
}

// What a thread merges of a team's sums: four channels at a time of all q heads.
#define ROUNDS ((G * CHANNELS + WARPS * 128 - 1) / (WARPS * 128))

// The parts that other launches have left of those channels.
struct Earlier {
  Merged parts[ROUNDS];

  // All rounds ask for two parts each before any of them waits.
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

// Merges the sums of a team's warps: the output, or a part of it where there are several.
// earlier: what else is in the output, with MERGE 3. ml: maximum and weight of each warp and head.
// weight_top: log2 of what a weight of 1 stands for under the maximum.
// value(c, l, sum): a column of V from its sum.
template <class F>
__device__ __forceinline__ void merge_warps(const Call& at, const Unit& u, Earlier& earlier,
                                            char* shared, const float (*ml)[HEADS][2],
                                            float weight_top, F value) {
  sync_team(u);
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

// Merges all parts of a kv head, in the team that ends last, and writes the output.
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
