// Reads of a block before its first key: scales and zero-points of a span, and q.
#include "shared/query_fours.cuh"

// Numbers that a block needs before its first key and after its last one.
struct __align__(16) Prologue {
  u32 digits[HEADS][2][D / 4];  // [head][high, low][t][register]: channels 16 r + 4 t to + 3
  float v_scale[D], v_zero[D];
  int bias[4];
  float heads[HEADS][2];
#ifdef KEPT_SCORES
  float sums[HEADS][2];  // of the negative and of the positive channels, in units of the largest
#endif
};

// V's fours of channels of a thread.
#define V_FOURS ((CHANNELS / 4 + WARPS * 32 - 1) / (WARPS * 32))

// Scales and zero-points of a span, in the registers of who needs them. They are loaded before the
// first packed tiles: after those an answer takes microseconds, while memory serves all blocks'.
struct Params {
  uint2 k_scale[FOURS], k_zero[FOURS], v_scale[V_FOURS], v_zero[V_FOURS];

  __device__ __forceinline__ void load(const Arguments& at, const Unit& u) {
    const size_t row = (size_t)u.row * CHANNELS;
    if (u.warp < HEADS) {
#pragma unroll
      for (int i = 0; i < FOURS; i++) {
        const size_t c = row + min(channels_of(u, i), CHANNELS - 4);
        k_scale[i] = *(const uint2*)(at.k_scale + c), k_zero[i] = *(const uint2*)(at.k_zero + c);
      }
    }
#pragma unroll
    for (int i = 0; i < V_FOURS; i++) {
      if (of_thread(u, i) >= CHANNELS) continue;
      const size_t c = row + of_thread(u, i);
      v_scale[i] = *(const uint2*)(at.v_scale + c), v_zero[i] = *(const uint2*)(at.v_zero + c);
    }
  }
  __device__ __forceinline__ void store_value(const Unit& u, Prologue& p) const {
#pragma unroll
    for (int i = 0; i < V_FOURS; i++) {
      const int c = of_thread(u, i);
      if (c >= CHANNELS) continue;
      *(float4*)(p.v_scale + c) = floats_of(v_scale[i]);
      *(float4*)(p.v_zero + c) = floats_of(v_zero[i]);
    }
  }
  // V's go to the last threads: the first warps have q.
  static __device__ __forceinline__ int of_thread(const Unit& u, int i) {
    return ((i + 1) * WARPS * 32 - 1 - u.tid) * 4;
  }
};
