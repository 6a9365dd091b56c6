// What the decode kernels share: types, conversions, the ring of records, units of work, merging.
//
// Expects CHANNELS, D, G, HEADS, WARPS, STAGES, KEYS and RECORD_BYTES, and
//   HEADS    q heads with room for them in the sums, G or more
//   QUERY    q is fp16 (0), bf16 (1) or fp32 (2); OUT: so is the output
//   PAGED    records per page, or 0 where a sequence's records lie in one piece
//   ONE_RUN  defined where the tokens of a sequence are one block, from record 0 on
//   OVERLAP  0: a launch like any other; 1: it begins early, and waits before it reads q;
//            2: one of several launches of a call behind the first: q is there already
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define FULL 0xFFFFFFFFu
#define MINUS_INFINITY __int_as_float(0xff800000)

__device__ __forceinline__ u32 transpose8x8(u32 x) {
  u32 y;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0,%1;" : "=r"(y) : "r"(x));
  return y;
}
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float half_to_float(u16 x) {
  float y;
  asm("cvt.f32.f16 %0,%1;" : "=f"(y) : "h"(x));
  return y;
}
#if QUERY == 2
typedef float query_t;
__device__ __forceinline__ float query_to_float(float x) {
  return x;
}
#else
typedef u16 query_t;
__device__ __forceinline__ float query_to_float(u16 x) {
  return QUERY == 1 ? __uint_as_float((u32)x << 16) : half_to_float(x);
}
#endif
#if OUT == 2
typedef float out_t;
__device__ __forceinline__ float float_to_out(float x) {
  return x;
}
#else
typedef u16 out_t;
__device__ __forceinline__ u16 float_to_out(float x) {
  u16 y;
  if (OUT == 1)
    asm("cvt.rn.bf16.f32 %0,%1;" : "=h"(y) : "f"(x));
  else
    asm("cvt.rn.f16.f32 %0,%1;" : "=h"(y) : "f"(x));
  return y;
}
#endif
__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}
template <int N>  // words of one lane: vectors of `unit` words, [vector][lane][unit]
__device__ __forceinline__ void load_words(u32* out, u32 base, int lane) {
  if (N % 4 == 0) {
#pragma unroll
    for (int i = 0; i < N / 4; i++)
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                   : "=r"(out[4 * i]), "=r"(out[4 * i + 1]), "=r"(out[4 * i + 2]),
                     "=r"(out[4 * i + 3])
                   : "r"(base + i * 512 + lane * 16));
  } else if (N % 2) {
#pragma unroll
    for (int i = 0; i < N; i++)
      asm volatile("ld.shared.u32 %0,[%1];" : "=r"(out[i]) : "r"(base + i * 128 + lane * 4));
  } else {
#pragma unroll
    for (int i = 0; i < N / 2; i++)
      asm volatile("ld.shared.v2.u32 {%0,%1},[%2];"
                   : "=r"(out[2 * i]), "=r"(out[2 * i + 1])
                   : "r"(base + i * 256 + lane * 8));
  }
}
// A dependent launch begins while the kernel ahead of it in the stream still runs: it may read what
// was there before, and waits before it reads what that one writes. The first launch of a call
// waits for q, and lets the next one begin only then, which so finds q and need not wait for sums
// that it does not read; it waits before it ends, so that its end says that all have ended.
__device__ __forceinline__ void begin() {
#if OVERLAP == 2 && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_query() {
#if OVERLAP == 1 && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
#if OVERLAP < 2 && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_all() {
#if OVERLAP == 2 && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// What every launch is told.
struct Call {
  const query_t* query;      // [batch * q_heads, CHANNELS]
  const char* records;       // [batch * kv_heads, records_per_head, RECORD_BYTES], or
                             // [pages, kv_heads, PAGED, RECORD_BYTES]
  const int* pages;          // [batch, pages_per_sequence] where a sequence's records are, or null
  const long long* tokens;   // [batch, blocks + 1] token offsets of the blocks; lengths for ONE_RUN
  const int* first_records;  // [batch, blocks] where each block's records start; null for ONE_RUN
  float* partial;  // of each kv head: sums [parts, G, CHANNELS], maximum and weight [parts, G, 2]
  int* counters;   // [batch * kv_heads, 2], zero before and after
  out_t* out;      // rows of q heads
  float* lse;      // log2, or null
  long long out_stride, lse_stride;  // elements between q heads
  int kv_heads, blocks, records_per_head, splits, pages_per_sequence;
  int first_part, all_parts;  // of all launches of a call, which share partial and counters
  float sm_scale;             // times log2(e)
};

// A block's share of the work: some records of one block of tokens of one kv head.
struct Unit {
  int lane, g, t, warp, tid;
  int head, part, row, length, first, last;
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
};

// The same, but the compiler keeps it instead of making it anew for every record.
__device__ __forceinline__ u32 pinned(u32 x, int lane) {
  u32 y;
  asm volatile("shfl.sync.idx.b32 %0,%1,%2,0x1f,0xffffffff;" : "=r"(y) : "r"(x), "r"(lane));
  return y;
}
__device__ __forceinline__ void find_unit(const Call& at, Unit& u) {
  u.tid = threadIdx.x, u.warp = u.tid >> 5;
  u.lane = pinned(u.tid & 31, u.tid & 31), u.g = u.lane >> 2, u.t = u.lane & 3;
  const int unit = blockIdx.x;
  // Divisions cost as much as a tile of keys: none where there is one part.
  const int parts = at.blocks * at.splits, sequence = unit / parts / at.kv_heads;
  u.head = parts == 1 ? unit : unit / parts, u.part = unit - u.head * parts;
  const int block = at.splits == 1 ? u.part : u.part / at.splits,
            split = u.part - block * at.splits;
  u.row = u.head * at.blocks + block;
#ifdef ONE_RUN
  u.length = (int)at.tokens[sequence];
  const int first_record = 0;
#else
  const long long* edge = at.tokens + (size_t)sequence * (at.blocks + 1) + block;
  u.length = (int)(edge[1] - edge[0]);
  const int first_record = at.first_records[sequence * at.blocks + block];
#endif
  const int records = (u.length + KEYS - 1) / KEYS;
  u.first = at.splits == 1 ? 0 : (u32)records * split / at.splits;
  u.last = at.splits == 1 ? records : (u32)records * (split + 1) / at.splits;
#if PAGED
  u.table = at.pages + (size_t)sequence * at.pages_per_sequence;
  u.first_record = first_record;
  u.page_bytes = (size_t)at.kv_heads * PAGED * RECORD_BYTES;
  u.source = at.records + (size_t)(u.head - sequence * at.kv_heads) * PAGED * RECORD_BYTES;
#else
  u.source =
      at.records + ((size_t)u.head * at.records_per_head + first_record) * (size_t)RECORD_BYTES;
#endif
}

#include "ring.cuh"

// True in the block that finishes a kv head last.
__device__ __forceinline__ bool arrive_last(const Call& at, const Unit& u, int* flag) {
  __threadfence();
  __syncthreads();
  if (u.tid == 0) {
    const int old = atomicAdd(at.counters + 2 * u.head, 1);
    *flag = old == at.all_parts - 1;
    if (old == at.all_parts - 1) at.counters[2 * u.head] = at.counters[2 * u.head + 1] = 0;
  }
  __syncthreads();
  __threadfence();
  return *flag;
}

// m: log2 of what a weight of 1 stands for.
__device__ __forceinline__ void write_out(const Call& at, int head, int h, int c, float m, float l,
                                          float sum) {
  const size_t row = (size_t)head * G + h;
  at.out[row * at.out_stride + c] = float_to_out(l > 0.f ? sum / l : 0.f);
  if (at.lse && c == 0) at.lse[row * at.lse_stride] = l > 0.f ? m + __log2f(l) : MINUS_INFINITY;
}

// Where a warp puts its sums once its ring is free: rows of D + 8 floats.
__device__ __forceinline__ float* sums_of(char* shared, int w) {
  return (float*)(shared + w * (STAGES * SLOT_BYTES));
}

// Merges the sums of a block's warps, then of all parts of a kv head, and writes the output.
// ml: maximum and weight of each warp and head. whole: room for the block's. weight_top: log2 of
// what a weight of 1 stands for under the maximum. value(c, l, sum): a column of V from its sum.
template <class F>
__device__ __forceinline__ void finish(const Call& at, const Unit& u, char* shared,
                                       float (*ml)[HEADS][2], float (*whole)[2], int* flag,
                                       float weight_top, F value) {
  __syncthreads();
  if (u.tid < G) {  // each warp's maximum becomes its factor
    float m = -1e30f, l = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) m = fmaxf(m, ml[w][u.tid][0]);
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float z = exp2_fast(ml[w][u.tid][0] - m);
      l = fmaf(z, ml[w][u.tid][1], l);
      ml[w][u.tid][0] = z;
    }
    whole[u.tid][0] = m - weight_top, whole[u.tid][1] = l;
  }
  __syncthreads();
  const int parts = at.all_parts, part = at.first_part + u.part;
  float* partial = at.partial + (size_t)u.head * parts * G * (CHANNELS + 2);
  float2* partial_ml = (float2*)(partial + (size_t)parts * G * CHANNELS);
  for (int i = u.tid * 4; i < G * CHANNELS; i += WARPS * 128) {
    const int h = i / CHANNELS, c = i % CHANNELS;
    const float m = whole[h][0], l = whole[h][1];
    float sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      const float z = ml[w][h][0];
      const float4 x = *(const float4*)(sums_of(shared, w) + h * (D + 8) + c);
      sum[0] = fmaf(z, x.x, sum[0]), sum[1] = fmaf(z, x.y, sum[1]), sum[2] = fmaf(z, x.z, sum[2]),
      sum[3] = fmaf(z, x.w, sum[3]);
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
      sum[j] = l > 0.f ? value(c + j, l, sum[j]) : 0.f;  // scales of an empty block may be anything
    if (parts == 1) {
#pragma unroll
      for (int j = 0; j < 4; j++) write_out(at, u.head, h, c + j, m, l, sum[j]);
    } else {
      float* row = partial + (size_t)(part * G + h) * CHANNELS + c;
#pragma unroll
      for (int j = 0; j < 4; j++) __stcg(row + j, sum[j]);
      if (c == 0) __stcg(partial_ml + part * G + h, make_float2(m, l));
    }
  }
  if (parts == 1 || !arrive_last(at, u, flag)) {
    wait_for_all();
    return;
  }
  for (int i = u.tid; i < G * CHANNELS; i += WARPS * 32) {
    const int h = i / CHANNELS, c = i % CHANNELS;
    float m = -1e30f, l = 0.f, sum = 0.f;
#pragma unroll 16
    for (int s = 0; s < parts; s++) m = fmaxf(m, __ldcg(&partial_ml[s * G + h].x));
#pragma unroll 16
    for (int s = 0; s < parts; s++) {
      const float2 other = __ldcg(partial_ml + s * G + h);
      const float z = exp2_fast(other.x - m);
      l = fmaf(z, other.y, l);
      sum = fmaf(z, __ldcg(partial + (size_t)(s * G + h) * CHANNELS + c), sum);
    }
    write_out(at, u.head, h, c, m, l, sum);
  }
  wait_for_all();
}
