// W8A8 by Hopper's warpgroup products: y[token][out] = scales * sum over in of x * w, int8 codes.
// Or, GATED, of two weights: y = activation(gate's) * up's, in fp32, rounded once.
//
// Weights are the operand with 64 rows per warpgroup, tokens the one with any multiple of 16
// columns: no row of a tile is wasted on tokens that are not there.
//
//   a block: WGS warpgroups that multiply, ROWS times 64 outs each, and one whose first thread
//            loads tiles. They work on one tile together, or, in SUB_BLOCKS, each on every second
//            one: while one scales and writes its sums, the other multiplies
//   a stage: [OUTS = 64 ROWS WGS outs][128 ins] of w, [N tokens][128 ins] of x, by TMA, swizzled
//
// GATED, half of a stage's outs are gate's and half are the same outs of up. Each warpgroup has 64
// of both: a thread so has both sums of each number that it writes.
//
// Compiled by NVRTC with these macros:
//   N, SIXTEENS, A_OPERAND, B_OPERAND, D_OPERAND  see wgmma.cuh
//   WGS, SUB_BLOCKS, ROWS  as above; STAGES: of the ring
//   REGISTERS      of a thread that multiplies
//   OUT            type of y: 0 float16, 1 bfloat16, 2 float32
//   X0, W0, BIAS   types of these, 3: there is none
//   PER_ROW        1: a row scale per token, 0: one for all
//   GATED          0: no, 1: silu, 2: quick_gelu, 3: gelu_tanh. Then ROWS is 2, x0 is none
//   OVERLAP        0: none; 1: begins while the previous launch ends
//   ARGUMENTS_BYTES  size of Arguments on the host
typedef unsigned u32;
typedef unsigned long long u64;
#include "wgmma.cuh"

#define SUB_BLOCK_GROUPS (WGS / SUB_BLOCKS)
#define OUTS (64 * SUB_BLOCK_GROUPS * ROWS)
// Outs of w, or of gate's as of up's: those that a tile writes, and that a warpgroup does.
#define WRITTEN (GATED ? OUTS / 2 : OUTS)
#define WRITTEN_ROWS (GATED ? 1 : ROWS)
#define STEP 128
#define BAND 12
#define W_BYTES (OUTS * STEP)
#define X_BYTES (N * STEP)
#define STAGE_BYTES (W_BYTES + X_BYTES)
#define STAGING_BYTES (16 * 128)
// From a warpgroup's 64 outs to its next 64 in a stage: up's lie after all of gate's.
#define NEXT_ROW (GATED ? W_BYTES / 2 : 64 * STEP)
// Named barriers: of each warpgroup, and that a sub-block waits for.
#define GROUP_BARRIER 1
#define SUB_BLOCK_BARRIER 8

// A tensor's map as the host has encoded it for TMA.
struct alignas(64) TensorMap {
  char bytes[128];
};
struct Arguments {
  TensorMap w, x, up;
  void* y;
  const float *row_scale, *out_scale, *up_scale;
  const void *x0, *w0, *bias, *up_bias;
  int tokens, outs, steps, tiles_t, tiles_o, tiles, x_bytes;
  float factor;  // of every sum: codes may be kept as multiples
};

static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host has other arguments");
static_assert(!GATED || (ROWS == 2 && X0 == 3), "64 outs of gate and of up, no split column");

template <int TYPE>
__device__ __forceinline__ float load(const void* from, int i) {
  float y = 0.f;
  if (TYPE == 0) asm("cvt.f32.f16 %0,%1;" : "=f"(y) : "h"(((const unsigned short*)from)[i]));
  if (TYPE == 1) y = __uint_as_float((u32)((const unsigned short*)from)[i] << 16);
  if (TYPE == 2) y = ((const float*)from)[i];
  return y;
}
__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ void wait_for(u32 barrier, u32 phase) {
  asm volatile(
      "{.reg .pred P;\n WAIT: mbarrier.try_wait.parity.shared::cta.b64 P,[%0],%1;\n"
      " @P bra DONE;\n bra WAIT;\n DONE:\n}" ::"r"(barrier),
      "r"(phase)
      : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _,[%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _,[%0],%1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void load(const TensorMap& map, u32 to, u32 barrier, int in, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0],[%1,{%3,%4}],[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(in), "r"(row)
      : "memory");
}
__device__ __forceinline__ void wait_for_launch_before() {
#if OVERLAP
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Where a tile begins. Tiles follow each other along tokens, in bands of BAND. Those that run at
// one time share their rows of w and of x in L2.
struct Tile {
  int out, token;

  __device__ __forceinline__ void find(const Arguments& at, int i) {
    const int band = i / (BAND * at.tiles_o), first = band * BAND;
    const int wide = min(BAND, at.tiles_t - first), within = i - first * at.tiles_o;
    // The last tile starts where it ends with the rows: none is beyond the tensor, but where there
    // are fewer tokens than columns.
    out = min(within / wide * WRITTEN, at.outs - WRITTEN);
    token = max(0, min((first + within % wide) * N, at.tokens - N));
  }
};

// A ring of stages, and where in it somebody is.
struct Stages {
  u32 memory, full, empty;
  int slot, phase;

  __device__ __forceinline__ void next() {
    if (++slot == STAGES) slot = 0, phase ^= 1;
  }
  __device__ __forceinline__ void skip(int steps) {
    const int at = slot + steps;
    slot = at % STAGES, phase ^= at / STAGES & 1;
  }
  __device__ __forceinline__ u32 w() const { return memory + slot * STAGE_BYTES; }
  __device__ __forceinline__ u32 x() const { return w() + W_BYTES; }
};

__device__ __forceinline__ void load_weights(const Arguments& at, const Stages& s, int step,
                                             int out) {
  const u32 full = s.full + 8 * s.slot;
  expect(full, W_BYTES + at.x_bytes);
  load(at.w, s.w(), full, step * STEP, out);
  if (GATED) load(at.up, s.w() + W_BYTES / 2, full, step * STEP, out);
}

__device__ __forceinline__ void produce(const Arguments& at, Stages s) {
  bool waited = !OVERLAP;
  for (int i = blockIdx.x; i < at.tiles; i += gridDim.x) {
    Tile tile;
    tile.find(at, i);
    int step = 0;
    if (!waited) {
      // Weights are nobody's output: they are loaded before x may be read.
      Stages early = s;
      for (; step < min(at.steps, STAGES); step++, early.next())
        load_weights(at, early, step, tile.out);
      wait_for_launch_before();
      waited = true;
      for (int first = 0; first < step; first++, s.next())
        load(at.x, s.x(), s.full + 8 * s.slot, first * STEP, tile.token);
    }
    for (; step < at.steps; step++, s.next()) {
      wait_for(s.empty + 8 * s.slot, s.phase ^ 1);
      load_weights(at, s, step, tile.out);
      load(at.x, s.x(), s.full + 8 * s.slot, step * STEP, tile.token);
    }
  }
}

#include "wgmma_outputs.cuh"

// The sums of a tile, [64 outs of this warpgroup][as `multiply` has them].
__device__ __forceinline__ void add_up(int (&sums)[ROWS][N / 2], const Arguments& at, Stages& s,
                                       int following) {
  const int group = (threadIdx.x >> 7) % SUB_BLOCK_GROUPS, thread = threadIdx.x & 127;
  u32 before = 0;
  for (int step = 0; step < at.steps; step++, s.next()) {
    wait_for(s.full + 8 * s.slot, s.phase);
    // The other sub-block may wait for its own steps only after all of this one's are there. A
    // barrier knows a phase from the next one, but not from the one after that.
    if (step == at.steps - 1 && following >= 0)
      asm volatile("bar.arrive %0,256;" ::"r"(SUB_BLOCK_BARRIER + following) : "memory");
    const u64 w = operand(s.w() + group * (WRITTEN_ROWS * 64 * STEP)), x = operand(s.x());
    multiply_begin();
#pragma unroll
    for (int n = 0; n < STEP / 32; n++)
#pragma unroll
      for (int row = 0; row < ROWS; row++)
        multiply(sums[row], w + row * (NEXT_ROW >> 4) + 2 * n, x + 2 * n, n || step);
    multiply_commit();
    multiply_wait<1>();
    if (step && thread == 0) arrive(before);
    before = s.empty + 8 * s.slot;
  }
  multiply_wait<0>();
#pragma unroll
  for (int row = 0; row < ROWS; row++) settle(sums[row]);
  if (thread == 0) arrive(before);
}

__device__ __forceinline__ void consume(const Arguments& at, Stages s, u32 staging) {
  const int sub_block = (threadIdx.x >> 7) / SUB_BLOCK_GROUPS;
  for (int i = blockIdx.x, round = 0; i < at.tiles; i += gridDim.x, round++) {
    if (round % SUB_BLOCKS != sub_block) {
      s.skip(at.steps);
      continue;
    }
    if (SUB_BLOCKS > 1 && round)
      asm volatile("bar.sync %0,256;" ::"r"(SUB_BLOCK_BARRIER + sub_block) : "memory");
    int sums[ROWS][N / 2];
    add_up(sums, at, s, SUB_BLOCKS > 1 && i + gridDim.x < at.tiles ? 1 - sub_block : -1);
    // Who reads y's memory at present may be in the previous launch.
    wait_for_launch_before();
    Tile tile;
    tile.find(at, i);
#pragma unroll
    for (int row = 0; row < WRITTEN_ROWS; row++) {
      Outputs outputs;
      outputs.find(at, tile, staging, row);
#pragma unroll
      for (int j = 0; j < SIXTEENS; j++)
        outputs.store(at, j, sums[row] + 8 * j, sums[ROWS - 1] + 8 * j);
    }
  }
}

extern "C" __global__ void __launch_bounds__((WGS + 1) * 128, 1)
    wgmma_gemm(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  __shared__ __align__(128) char staging[WGS * 2 * STAGING_BYTES];
  Stages s;
  s.memory = shared_address(shared);
  s.full = shared_address(barriers), s.empty = s.full + 8 * STAGES;
  s.slot = s.phase = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(s.full + 8 * i));
      asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(s.empty + 8 * i),
                   "r"(SUB_BLOCK_GROUPS));
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
#if OVERLAP
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  if (threadIdx.x >= WGS * 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (threadIdx.x == WGS * 128) produce(at, s);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
    consume(at, s, shared_address(staging));
  }
}
