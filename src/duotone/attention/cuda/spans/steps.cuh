// Codes of a step: 16 channels of 32 tokens. With g = lane / 4, t = lane % 4, register i of a lane
// has byte j for code
//   K: token 8 i + g, channel 16 step + 4 t + j
//   V: token 8 (i / 2) + 2 t + 16 (j % 2) + j / 2, channel 16 step + 8 (i % 2) + g

// Expects SHARERS: warps that share a tile. Each has as many of the registers, OWN of them from
// `first` on.
#define OWN (4 / SHARERS)

// Memory of a packing warp: its elements, room for words, the levels of its channels.
struct Job {
  u32 tile, words, levels;
  int lane, g, t, first;

  __device__ __forceinline__ void set_lane(int at) { lane = at, g = at >> 2, t = at & 3; }
};

// V's elements of a step: own registers of both chunks of 16 tokens.
__device__ __forceinline__ void load_chunks(Pair (*y)[OWN], const Job& job, int step) {
#pragma unroll
  for (int chunk = 0; chunk < 2; chunk++)
    if (OWN == 4) load_fragment<true>(y[chunk], job.tile, step, chunk, job.lane);
  if (OWN == 2) load_halves(y[0], job.tile, step, job.first / 2, job.lane);
}

// By arithmetic in floats. Levels in shared memory: [zero-point, numbers of a Coder][channel].
// LEVEL_PARTS: of a channel, each found by itself.
template <int VALUE, int BITS>
struct Steps {
  static constexpr int SEEN = VALUE ? 2 : 4;  // channels of a lane in a step
  static constexpr int LEVEL_PARTS = 1;

  static __device__ __forceinline__ void store_levels(u32 levels, const Levels& l, int channel,
                                                      int) {
    Coder<BITS> coder;
    coder.set(l);
    store_shared(levels + channel * 4, __float_as_uint(l.zero));
#pragma unroll
    for (int n = 0; n < Coder<BITS>::NUMBERS; n++)
      store_shared(levels + ((n + 1) * D + channel) * 4, __float_as_uint(coder.x[n]));
  }
  static __device__ __forceinline__ void codes(u32* registers, const Job& job, int step) {
    float x[OWN][4], zero[SEEN];
    Coder<BITS> coder[SEEN];
    load(x, job, step);
    load_levels(zero, coder, job, step);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      u32 code[4];  // in the lowest byte
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int n = VALUE ? i % 2 : j;
        code[j] = __float_as_uint(coder[n].lifted(__fsub_rn(x[i][j], zero[n])));
      }
      registers[i] = __byte_perm(__byte_perm(code[0], code[1], 0x40),
                                 __byte_perm(code[2], code[3], 0x40), 0x5410);
    }
  }
  // x[i][j]: the elements of a step.
  static __device__ __forceinline__ void load(float (*x)[4], const Job& job, int step) {
    if constexpr (VALUE) {
      Pair y[2][OWN];
      load_chunks(y, job, step);
#pragma unroll
      for (int chunk = 0; chunk < 2; chunk++)
#pragma unroll
        for (int i = 0; i < OWN; i++)
          x[i][chunk] = number(y[chunk][i], 0), x[i][2 + chunk] = number(y[chunk][i], 1);
    } else {
#pragma unroll
      for (int i = 0; i < OWN; i++)
        load_row(x[i], job.tile + (8 * (job.first + i) + job.g) * ROW_BYTES,
                 (16 * step + 4 * job.t) * ELEMENT_BYTES);
    }
  }
  // Four consecutive elements of a token.
  static __device__ __forceinline__ void load_row(float* x, u32 row, int at) {
#if INPUT == 2
    load_shared(x, row + at);
#else
    u32 y[2];
    load_shared(y, row + at);
    const Pair low = {y[0]}, high = {y[1]};
    x[0] = number(low, 0), x[1] = number(low, 1), x[2] = number(high, 0), x[3] = number(high, 1);
#endif
  }
  static __device__ __forceinline__ void load_levels(float* zero, Coder<BITS>* coder,
                                                     const Job& job, int step) {
#pragma unroll
    for (int row = 0; row < 1 + Coder<BITS>::NUMBERS; row++) {
      float y[4];
      const u32 at = job.levels + (row * D + 16 * step) * 4;
      if constexpr (VALUE)
        y[0] = __uint_as_float(load_shared(at + job.g * 4)),
        y[1] = __uint_as_float(load_shared(at + (8 + job.g) * 4));
      else
        load_shared(y, at + job.t * 16);
#pragma unroll
      for (int n = 0; n < SEEN; n++) (row ? coder[n].x[row - 1] : zero[n]) = y[n];
    }
  }
};

#if INPUT != 2
#include "spans/thresholds.cuh"
template <int VALUE>
struct Steps<VALUE, 1> : ComparedSteps<VALUE, 1> {};
template <int VALUE>
struct Steps<VALUE, 2> : ComparedSteps<VALUE, 2> {};
#endif
