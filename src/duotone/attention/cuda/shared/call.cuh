// Common to every kernel of a call: types, conversions, dependent launches, arguments, the output.
//
// Expects CHANNELS and G, and
//   QUERY    q is fp16 (0), bf16 (1) or fp32 (2); OUT: so is the output
//   OVERLAP  0: a launch like any other; 1: it begins early, and waits before it reads q;
//            2: one of several launches of a call after the first: q is there already
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
// Sum over the lanes of a warp.
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(FULL, x, o);
  return x;
}
// Largest number of the lanes. None is negative: their bits order as they do.
__device__ __forceinline__ float most_of_lanes(float x) {
  return __uint_as_float(__reduce_max_sync(FULL, __float_as_uint(x)));
}
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
// A dependent launch begins while the previous kernel in the stream still runs. It may read what
// was there before, and waits before it reads what that kernel writes.
//
// The first launch of a call waits for q and lets the next launch begin only then. The next launch
// so finds q, and need not wait for sums that it does not read. It waits before it ends, so that
// its end says that all have ended. The launch that merges, the last one of some calls, waits
// before it reads what the others left. All their blocks are resident by then, so that no block
// waits for one that has no multiprocessor yet.
//
// rotate/queries.cu, before a call, is like a first launch: any launch after the next one finds
// what it wrote.
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

// Arguments of every launch.
struct Call {
  // Fields that a block begins with, up to `splits`, are one line of constant memory: another line
  // takes as long as an answer.
  const long long* tokens;  // [batch, blocks + 1] token offsets of the blocks; lengths for ONE_RUN
  const int* first_packed_tiles;  // [batch, blocks] of each block; null for ONE_RUN
  const query_t* query;           // [batch * q_heads, CHANNELS]
  const char* packed_tiles;  // [batch * kv_heads, packed_tiles_per_head, PACKED_TILE_BYTES], or
                             // [pages, kv_heads, PAGED, PACKED_TILE_BYTES]
  int kv_heads, blocks, splits, packed_tiles_per_head;
  u32 splits_inverse;  // 2^32 / splits, rounded up: exact while splits * packed tiles < 2^32
  const int* pages;    // [batch, pages_per_sequence] where a sequence's packed tiles are, or null
  float* partial;      // sums of each kv head's parts, [batch * kv_heads, parts, G, CHANNELS]
  float2* weights;     // and their maximum and weight, [batch * kv_heads, parts, G]
  int* counters;       // [batch * kv_heads, 2], zero before and after; null without tickets
  out_t* out;          // rows of q heads, aligned to four numbers
  float* lse;          // log2, or null
  long long out_stride, lse_stride;  // elements between q heads
  int pages_per_sequence;
  int first_part, all_parts;  // of all launches of a call, which share partial and counters
  int units;                  // of this launch: kv heads times its parts
  float sm_scale;             // times log2(e)
};

struct __align__(4 * sizeof(out_t)) FourOut {
  out_t x[4];
};
// Channels c to c + 3 of a q head. m: log2 of what a weight of 1 stands for. 0 without keys; what is
// not a number stays none.
__device__ __forceinline__ void write_out(const Call& at, int head, int h, int c, float m, float l,
                                          const float* sums) {
  const size_t row = (size_t)head * G + h;
  const float by = 1.f / l;
  FourOut y;
#pragma unroll
  for (int j = 0; j < 4; j++) y.x[j] = float_to_out(l == 0.f ? 0.f : sums[j] * by);
  *(FourOut*)(at.out + row * at.out_stride + c) = y;
  if (at.lse && c == 0) at.lse[row * at.lse_stride] = l == 0.f ? MINUS_INFINITY : m + __log2f(l);
}
