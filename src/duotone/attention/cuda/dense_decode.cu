// Decode attention on 16-bit K and V: sinks, windows and text beside packed segments.
//
// Keys are the A operand of fp16 or bf16 products; a q head takes two columns of B, for two digits
// of q and of the softmax's weights, so that neither is rounded to the type of K and V.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V, a multiple of 16
//   KV        type of K and V: 0 float16, 1 bfloat16
//   G, WARPS, PER_SM, STAGES, QUERY, OUT, OVERLAP, ARGUMENTS_BYTES  as in span_decode.cu
#define D CHANNELS
#define KC (CHANNELS / 16)  // chunks of 16 channels
#define HT ((G + 3) / 4)    // tiles of 8 columns: 4 q heads of two digits
#define HEADS (HT * 4)
#define KEYS 16
// A row of K or V in shared memory, 16 bytes longer than it is: eight rows meet all banks.
#define ROW_BYTES (CHANNELS * 2 + 16)
#define RECORD_BYTES (2 * KEYS * ROW_BYTES)
#define ONE_RUN
#include "common.cuh"

#define TOP_WEIGHT 16384.f
#define LIFT 6.f  // how far above 1 the largest weight enters

struct Arguments : Call {
  const char* key;  // tokens of a head are adjacent; the rest in bytes
  const char* value;
  long long key_batch, key_head, value_batch, value_head;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

#include "dense_sums.cuh"

#define CHUNKS (CHANNELS / 8)  // 16 bytes of a row each

// 16 tokens: rows of K, then of V. Lanes copy 16 bytes each: rows are apart in shared memory, and a
// bulk copy for every 256 bytes is slower (LOG.md, fifth session).
struct DenseRing : Ring {
  const char *keys, *values;

  __device__ __forceinline__ void aim(const Arguments& at, const Unit& u) {
    const int sequence = (u32)u.head / at.kv_heads, head = u.head - sequence * at.kv_heads;
    keys = at.key + sequence * at.key_batch + head * at.key_head;
    values = at.value + sequence * at.value_batch + head * at.value_head;
  }
  // Behind the last token its row is read again: what a weight of 0 meets must be a number.
  __device__ __forceinline__ void ask(const Unit& u, int record) {
    const int last = u.length - 1 - record * KEYS;
    const size_t first = (size_t)record * KEYS * (CHANNELS * 2);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
      const bool of_keys = i < CHUNKS / 2;
      const int place = i % (CHUNKS / 2) * 32 + u.lane, row = place / CHUNKS;
      const u32 offset = place % CHUNKS * 16;
      asm volatile(
          "cp.async.cg.shared.global [%0],[%1],16;" ::"r"(
              memory + slot * RECORD_BYTES + (of_keys ? row : KEYS + row) * ROW_BYTES + offset),
          "l"((of_keys ? keys : values) + first + min(row, last) * (CHANNELS * 2) + offset)
          : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  __device__ __forceinline__ void start_rows(const Unit& u) {
    current = u.first + u.warp;
    if (current < u.last) ask(u, current);
  }
  __device__ __forceinline__ u32 take_rows(const Unit& u, int& next) {
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncwarp();
    const u32 here = memory + slot * RECORD_BYTES;
    slot = slot == STAGES - 1 ? 0 : slot + 1;
    next = 0;
    if (u.lane == 0) next = draw();
    next = __shfl_sync(FULL, next, 0);
    if (next < u.last) ask(u, next);
    return here;
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_SM)
    dense_decode(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ float ml[WARPS][HEADS][2], whole[HEADS][2];
  __shared__ int flag, drawn;
  __shared__ __align__(8) u64 barriers[WARPS * STAGES];
  begin();
  wait_for_query();  // lengths and the newest token may have changed, too
  Unit u;
  find_unit(at, u);
  DenseRing ring;
  ring.make(u, shared, barriers, &drawn);
  ring.reset(u);
  ring.aim(at, u);
  ring.start_rows(u);
  Query q;
  q.load(at, u);
  __syncthreads();
  Sums sums;
  sums.clear();
  while (ring.current < u.last) {
    int next;
    const u32 here = ring.take_rows(u, next);
    float s[HT][2];
    q.dot(s, here, u.lane);
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const bool there = ring.current * KEYS + 8 * r + u.g < u.length;
        s[h][r] = there ? s[h][r] * at.sm_scale : MINUS_INFINITY;
      }
    sums.weigh(s);
    sums.add(s, here + KEYS * ROW_BYTES, u.lane);
    ring.current = next;
  }
  ring.leave();
  sums.store(u, sums_of(shared, u.warp), ml[u.warp]);
  finish(at, u, shared, ml, whole, &flag, 0.f, [](int, float, float sum) { return sum; });
}
