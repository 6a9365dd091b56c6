// W8A8 by Hopper's warpgroup products: y[token][out] = scales * sum over in of x * w, int8 codes.
//
// Weights are the operand with 64 rows per warpgroup, tokens the one with any multiple of 16
// columns: no row of a tile is wasted on tokens that are not there.
//
//   a block: WGS warpgroups that multiply, ROWS times 64 outs each, and one whose first thread asks
//            for tiles. They work on one tile together, or, in TEAMS, each on every second one:
//            while one scales and writes its sums, the other multiplies
//   a stage: [OUTS = 64 ROWS WGS outs][128 ins] of w, [N tokens][128 ins] of x, by TMA, swizzled
//
// Compiled by NVRTC with these macros:
//   N, SIXTEENS, A_OPERAND, B_OPERAND, D_OPERAND  see wgmma.cuh
//   WGS, TEAMS, ROWS, STAGES
//   REGISTERS      of a thread that multiplies
//   OUT            type of y: 0 float16, 1 bfloat16, 2 float32
//   X0, W0, BIAS   types of these, 3: there is none
//   PER_ROW        1: a row scale per token, 0: one for all
//   OVERLAP        0: none; 1: begins while the launch ahead ends
//   ARGUMENTS_BYTES  what the host takes Arguments to be
typedef unsigned u32;
typedef unsigned long long u64;
#include "wgmma.cuh"

#define TEAM_GROUPS (WGS / TEAMS)
#define OUTS (64 * TEAM_GROUPS * ROWS)
#define STEP 128
#define BAND 12
#define W_BYTES (OUTS * STEP)
#define X_BYTES (N * STEP)
#define STAGE_BYTES (W_BYTES + X_BYTES)
#define TURN_BYTES (16 * 128)
// Named barriers: of each warpgroup, and that a team waits for.
#define GROUP_BARRIER 1
#define TEAM_BARRIER 8

// What the host has encoded for TMA.
struct alignas(64) TensorMap {
  char bytes[128];
};
struct Arguments {
  TensorMap w, x;
  void* y;
  const float *row_scale, *out_scale;
  const void *x0, *w0, *bias;
  int tokens, outs, steps, tiles_t, tiles_o, tiles, x_bytes;
  float factor;  // of every sum: codes may be kept as multiples
};

static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host has other arguments");

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
__device__ __forceinline__ void ask(const TensorMap& map, u32 to, u32 barrier, int in, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      " [%0],[%1,{%3,%4}],[%2];" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(in), "r"(row)
      : "memory");
}
__device__ __forceinline__ void wait_for_launch_ahead() {
#if OVERLAP
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Where a tile begins. Tiles that run at one time share their rows of w and of x in L2: they follow
// each other along tokens, in bands of BAND.
struct Tile {
  int out, token;

  __device__ __forceinline__ void find(const Arguments& at, int i) {
    const int band = i / (BAND * at.tiles_o), first = band * BAND;
    const int wide = min(BAND, at.tiles_t - first), within = i - first * at.tiles_o;
    // The last tile starts where it ends with the rows: none is beyond the tensor, but where there
    // are fewer tokens than columns.
    out = min(within / wide * OUTS, at.outs - OUTS);
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

__device__ __forceinline__ void produce(const Arguments& at, Stages s) {
  bool waited = !OVERLAP;
  for (int i = blockIdx.x; i < at.tiles; i += gridDim.x) {
    Tile tile;
    tile.find(at, i);
    int step = 0;
    if (!waited) {
      // Weights are nobody's output: they are asked for before x may be read.
      Stages early = s;
      for (; step < min(at.steps, STAGES); step++, early.next()) {
        expect(early.full + 8 * early.slot, W_BYTES + at.x_bytes);
        ask(at.w, early.w(), early.full + 8 * early.slot, step * STEP, tile.out);
      }
      wait_for_launch_ahead();
      waited = true;
      for (int first = 0; first < step; first++, s.next())
        ask(at.x, s.x(), s.full + 8 * s.slot, first * STEP, tile.token);
    }
    for (; step < at.steps; step++, s.next()) {
      const u32 full = s.full + 8 * s.slot;
      wait_for(s.empty + 8 * s.slot, s.phase ^ 1);
      expect(full, W_BYTES + at.x_bytes);
      ask(at.w, s.w(), full, step * STEP, tile.out);
      ask(at.x, s.x(), full, step * STEP, tile.token);
    }
  }
}

// Where a thread's numbers of y are: its outs (two rows of eight), and what they are scaled by.
struct Outputs {
  int out, token, g, c, group;
  float row_scale, scale[2], w0[2], bias[2];
  u32 turning;  // of this warpgroup: two times [16 tokens][64 outs] of 16 bits

  // Of the row-th 64 outs of this warpgroup.
  __device__ __forceinline__ void find(const Arguments& at, const Tile& tile, u32 memory, int row) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    group = threadIdx.x >> 7, g = lane >> 2, c = lane & 3;
    out = tile.out + (group % TEAM_GROUPS * ROWS + row) * 64, token = tile.token;
    turning = memory + group * (2 * TURN_BYTES);
    // Nobody reads what was turned before any more.
    asm volatile("bar.sync %0,128;" ::"r"(GROUP_BARRIER + group) : "memory");
    row_scale = at.row_scale[0];
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const int o = out + 16 * warp + 8 * h + g;
      scale[h] = at.out_scale[o];
      w0[h] = load<W0>(at.w0, o), bias[h] = load<BIAS>(at.bias, o);
    }
  }
  __device__ __forceinline__ float scaled(const Arguments& at, int sum, int t, int h) const {
    t = min(t, at.tokens - 1);
    float y = __fmul_rn((float)sum * at.factor, PER_ROW ? at.row_scale[t] : row_scale);
    y = __fmul_rn(y, scale[h]);
    if (X0 != 3) y = __fadd_rn(y, __fmul_rn(load<X0>(at.x0, t), w0[h]));
    if (BIAS != 3) y = __fadd_rn(y, bias[h]);
    return y;
  }
  // Sixteen tokens from 16 j on; sums as `multiply` has them.
  __device__ __forceinline__ void store(const Arguments& at, int j, const int* sums) const {
    const int first = token + 16 * j, lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
#if OUT == 2
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const int t = first + n / 4 * 8 + 2 * c + n % 2, h = n / 2 % 2;
      float* y = (float*)at.y + (long long)t * at.outs + out + 16 * warp + 8 * h + g;
      if (t < at.tokens) *y = scaled(at, sums[n], t, h);
    }
#else
    u32 pair[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {  // eight tokens, eight outs: matrix n
      const int t = first + n / 2 * 8 + 2 * c, h = n % 2;
      const float low = scaled(at, sums[2 * n], t, h), high = scaled(at, sums[2 * n + 1], t + 1, h);
      if (OUT == 1) asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(pair[n]) : "f"(high), "f"(low));
      if (OUT == 0) asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(pair[n]) : "f"(high), "f"(low));
    }
    // Rows of tokens, through shared memory: a token's 64 outs are 128 bytes, whose pieces of 16
    // are in the order that keeps banks apart.
    const u32 here = turning + j % 2 * TURN_BYTES;
    const int own = lane / 16 * 8 + lane % 8, piece = 2 * warp + lane / 8 % 2;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(
                     here + own * 128 + (piece ^ own % 8) * 16),
                 "r"(pair[0]), "r"(pair[1]), "r"(pair[2]), "r"(pair[3])
                 : "memory");
    asm volatile("bar.sync %0,128;" ::"r"(GROUP_BARRIER + group) : "memory");
    const int thread = threadIdx.x & 127, row = thread / 8, eight = thread % 8;
    u32 v[4];
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(here + row * 128 + (eight ^ row % 8) * 16));
    if (first + row < at.tokens) {
      unsigned short* y = (unsigned short*)at.y + (long long)(first + row) * at.outs + out;
      *(uint4*)(y + 8 * eight) = make_uint4(v[0], v[1], v[2], v[3]);
    }
#endif
  }
};

// The sums of a tile, [64 outs of this warpgroup][as `multiply` has them].
__device__ __forceinline__ void add_up(int (&sums)[ROWS][N / 2], const Arguments& at, Stages& s,
                                       int following) {
  const int group = (threadIdx.x >> 7) % TEAM_GROUPS, thread = threadIdx.x & 127;
  u32 before = 0;
  for (int step = 0; step < at.steps; step++, s.next()) {
    wait_for(s.full + 8 * s.slot, s.phase);
    // Not before all of this team's steps are there may the other wait for its own: a barrier
    // knows a phase from the next one, but not from the one behind that.
    if (step == at.steps - 1 && following >= 0)
      asm volatile("bar.arrive %0,256;" ::"r"(TEAM_BARRIER + following) : "memory");
    const u64 w = operand(s.w() + group * (ROWS * 64 * STEP)), x = operand(s.x());
    multiply_begin();
#pragma unroll
    for (int n = 0; n < STEP / 32; n++)
#pragma unroll
      for (int row = 0; row < ROWS; row++)
        multiply(sums[row], w + row * (64 * STEP >> 4) + 2 * n, x + 2 * n, n || step);
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

__device__ __forceinline__ void consume(const Arguments& at, Stages s, u32 turning) {
  const int team = (threadIdx.x >> 7) / TEAM_GROUPS;
  for (int i = blockIdx.x, turn = 0; i < at.tiles; i += gridDim.x, turn++) {
    if (turn % TEAMS != team) {
      s.skip(at.steps);
      continue;
    }
    if (TEAMS > 1 && turn) asm volatile("bar.sync %0,256;" ::"r"(TEAM_BARRIER + team) : "memory");
    int sums[ROWS][N / 2];
    add_up(sums, at, s, TEAMS > 1 && i + gridDim.x < at.tiles ? 1 - team : -1);
    // Who reads y's memory at present may be in the launch ahead.
    wait_for_launch_ahead();
    Tile tile;
    tile.find(at, i);
#pragma unroll
    for (int row = 0; row < ROWS; row++) {
      Outputs outputs;
      outputs.find(at, tile, turning, row);
#pragma unroll
      for (int j = 0; j < SIXTEENS; j++) outputs.store(at, j, sums[row] + 8 * j);
    }
  }
}

extern "C" __global__ void __launch_bounds__((WGS + 1) * 128, 1)
    wgmma_gemm(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 barriers[2 * STAGES];
  __shared__ __align__(128) char turning[WGS * 2 * TURN_BYTES];
  Stages s;
  s.memory = shared_address(shared);
  s.full = shared_address(barriers), s.empty = s.full + 8 * STAGES;
  s.slot = s.phase = 0;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) {
      asm volatile("mbarrier.init.shared::cta.b64 [%0],1;" ::"r"(s.full + 8 * i));
      asm volatile("mbarrier.init.shared::cta.b64 [%0],%1;" ::"r"(s.empty + 8 * i),
                   "r"(TEAM_GROUPS));
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
    consume(at, s, shared_address(turning));
  }
}
