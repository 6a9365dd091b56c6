// Decode attention on K and V of 16 bits: sinks, windows and text, in addition to packed segments.
//
// Keys are the A operand of fp16 or bf16 products. A q head takes two columns of B, for two digits
// of q and of the softmax's weights. Neither is rounded to the type of K and V.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V, a multiple of 16
//   KV        type of K and V: 0 float16, 1 bfloat16
//   KEYS      tokens of a packed tile, a multiple of 16
//   STAGES    packed tiles that a warp has room for, 2 or more: all but one of them are in flight
//   G, WARPS, PER_SM, QUERY, OUT, OVERLAP, ARGUMENTS_BYTES  as in spans/decode.cu
#define D CHANNELS
#define KC (CHANNELS / 16)  // chunks of 16 channels
#define HT ((G + 3) / 4)    // tiles of 8 columns: 4 q heads of two digits
#define HEADS (HT * 4)
#define KT (KEYS / 16)  // tiles of 16 tokens
#define TOKEN_BYTES (CHANNELS * 2)
// A row of K or V in shared memory, an odd number of 16 bytes: eight rows meet all banks.
#define ROW_BYTES ((TOKEN_BYTES / 16 | 1) * 16)
#define PACKED_TILE_BYTES (2 * KEYS * ROW_BYTES)
#define ONE_RUN
#include "shared/common.cuh"

#define TOP_WEIGHT 16384.f
#define LIFT 6.f  // how far above 1 the largest weight enters

struct Arguments : Call {
  const char* key;  // tokens of a head are adjacent; the rest in bytes
  const char* value;
  long long key_batch, key_head, value_batch, value_head;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");
static_assert(HEADS * (D + 8) * 4 <= STAGES * PACKED_TILE_BYTES,
              "a warp's sums go where its ring was");

#include "dense/operands.cuh"
#include "dense/sums.cuh"

#define VECTORS (TOKEN_BYTES / 16)  // of a row
#define STRIDE_BYTES (WARPS * KEYS * TOKEN_BYTES)

// Packed tiles are rows of K, then of V, of KEYS tokens; a warp has every WARPS-th. Lanes copy 16
// bytes each: rows have gaps between them in shared memory, and a bulk copy for every 256 bytes was
// measured slower.
struct DenseRing {
  const char *keys, *values;  // this lane's first 16 bytes of the packed tile to load
  u32 memory;
  int left;  // tokens of the unit from that packed tile on
  int slot, current;

  __device__ __forceinline__ void aim(const Arguments& at, const Unit& u, char* shared) {
    const int sequence = u.sequence, head = u.kv_head;
    slot = 0, current = u.first + u.warp;
    left = min(u.length, u.last * KEYS) - current * KEYS;
    const size_t first = (size_t)current * (KEYS * TOKEN_BYTES) + u.lane * 16;
    keys = at.key + sequence * at.key_batch + head * at.key_head + first;
    values = at.value + sequence * at.value_batch + head * at.value_head + first;
    memory =
        pinned(shared_address(shared) + (threadIdx.x >> 5) * (STAGES * PACKED_TILE_BYTES), u.lane);
  }
  // Rows after the last token are zeros: what a weight of 0 meets must be a number.
  __device__ __forceinline__ void load(const Unit& u, int slot) {
    if (left > 0) {
      constexpr int ALL = KEYS * VECTORS;  // of K
      const u32 to = memory + slot * PACKED_TILE_BYTES;
#pragma unroll
      for (int i = 0; i < 2 * ALL / 32; i++) {
        const bool of_keys = ALL % 32 == 0 ? i < ALL / 32 : i * 32 + u.lane < ALL;
        const int before = of_keys ? 0 : ALL;
        copy(to + (of_keys ? 0 : KEYS * ROW_BYTES) + offset_of(i * 32 - before, u.lane),
             (of_keys ? keys : values) + (i * 32 - before) * 16,
             i * 32 - before + u.lane < left * VECTORS);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    keys += STRIDE_BYTES, values += STRIDE_BYTES, left -= WARPS * KEYS;
  }
  // Address of the 16 bytes number n + lane of K or V. n is a multiple of 32 where lanes have one
  // row or several whole ones.
  static __device__ __forceinline__ u32 offset_of(int n, int lane) {
    if (32 % VECTORS == 0)
      return n / VECTORS * ROW_BYTES + lane / VECTORS * ROW_BYTES + lane % VECTORS * 16;
    return (n + lane) / VECTORS * ROW_BYTES + (n + lane) % VECTORS * 16;
  }
  static __device__ __forceinline__ void copy(u32 to, const char* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(to), "l"(from),
                 "r"(real ? 16 : 0)
                 : "memory");
  }
  __device__ __forceinline__ void start(const Unit& u) {
#pragma unroll
    for (int s = 0; s < STAGES - 1; s++) load(u, s);
  }
  // Waits for the current packed tile and loads another one into the slot of the previous one;
  // returns where the current one is.
  __device__ __forceinline__ u32 take(const Unit& u) {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 2) : "memory");
    __syncwarp();
    const u32 here = memory + slot * PACKED_TILE_BYTES;
    load(u, slot == 0 ? STAGES - 1 : slot - 1);
    slot = slot == STAGES - 1 ? 0 : slot + 1;
    return here;
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, PER_SM)
    dense_decode(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(16) char shared[];
  __shared__ float ml[WARPS][HEADS][2];
  __shared__ int flag;
  begin();
  wait_for_query();  // lengths and the newest token may have changed, too
  Unit u;
  find_unit(at, u);
  DenseRing ring;
  ring.aim(at, u, shared);
  ring.start(u);
  Query q;
  q.load(at, u);
  Sums sums;
  sums.clear();
  for (; ring.current < u.last; ring.current += WARPS) {
    const u32 here = ring.take(u);
    float s[KT][HT][2];
#pragma unroll
    for (int k = 0; k < KT; k++) {
      q.dot(s[k], here + k * 16 * ROW_BYTES, u.lane);
#pragma unroll
      for (int h = 0; h < HT; h++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          const bool there = ring.current * KEYS + 16 * k + 8 * r + u.g < u.length;
          s[k][h][r] = there ? s[k][h][r] * at.sm_scale : MINUS_INFINITY;
        }
    }
    sums.weigh(s);
#pragma unroll
    for (int k = 0; k < KT; k++) sums.add(s[k], here + (KEYS + 16 * k) * ROW_BYTES, u.lane);
  }
  __syncwarp();  // all lanes have read the last packed tile
  sums.store(u, sums_of(shared, u.warp), ml[u.warp]);
  finish(at, u, shared, ml, &flag, 0.f, [](int, float, float sum) { return sum; });
}
