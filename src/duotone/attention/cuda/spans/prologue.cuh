// Reads of a block before its first key: scales and zero-points of a span, and q.
#include "shared/query_fours.cuh"
#include "shared/small_floats.cuh"

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

// Scales, or zero-points (SIGNED), of four channels of a span, as they are stored.
template <bool SIGNED>
struct FourParameters {
#if SMALL_PARAMETERS
  u32 codes, exponent;

  __device__ __forceinline__ void load(const void* all, const Unit& u, int c) {
    const unsigned char* row = (const unsigned char*)all + (size_t)u.row * (CHANNELS + 1);
    exponent = row[0], codes = 0;
#pragma unroll
    for (int j = 0; j < 4; j++) codes |= (u32)row[1 + c + j] << 8 * j;
  }
  __device__ __forceinline__ float4 floats() const {
    const float unit = small_factor(exponent);
    const auto number = [&](int j) {
      return half_to_float(small_half<SIGNED>(codes >> 8 * j & 0xFF)) * unit;
    };
    return make_float4(number(0), number(1), number(2), number(3));
  }
#else
  uint2 halves;

  __device__ __forceinline__ void load(const void* all, const Unit& u, int c) {
    halves = *(const uint2*)((const u16*)all + ((size_t)u.row * CHANNELS + c));
  }
  __device__ __forceinline__ float4 floats() const { return floats_of(halves); }
#endif
};

// Lowest levels of four channels with codes of BITS bits, from what is stored as zero-points.
template <int BITS>
__device__ __forceinline__ float4 lowest_levels(float4 zero, float4 scale) {
#if SMALL_PARAMETERS
  constexpr float half = ((1 << BITS) - 1) * -0.5f;
  zero.x = fmaf(scale.x, half, zero.x), zero.y = fmaf(scale.y, half, zero.y);
  zero.z = fmaf(scale.z, half, zero.z), zero.w = fmaf(scale.w, half, zero.w);
#endif
  return zero;
}

// Scales and zero-points of a span, in the registers of who needs them. They are loaded before the
// first packed tiles: after those an answer takes microseconds, while memory serves all blocks'.
struct Params {
  FourParameters<false> k_scale[FOURS], v_scale[V_FOURS];
  FourParameters<true> k_zero[FOURS], v_zero[V_FOURS];

  __device__ __forceinline__ void load(const Arguments& at, const Unit& u) {
    if (u.warp < HEADS) {
#pragma unroll
      for (int i = 0; i < FOURS; i++) {
        const int c = min(channels_of(u, i), CHANNELS - 4);
        k_scale[i].load(at.k_scale, u, c), k_zero[i].load(at.k_zero, u, c);
      }
    }
#pragma unroll
    for (int i = 0; i < V_FOURS; i++) {
      if (of_thread(u, i) >= CHANNELS) continue;
      v_scale[i].load(at.v_scale, u, of_thread(u, i));
      v_zero[i].load(at.v_zero, u, of_thread(u, i));
    }
  }
  __device__ __forceinline__ void store_value(const Unit& u, Prologue& p) const {
#pragma unroll
    for (int i = 0; i < V_FOURS; i++) {
      const int c = of_thread(u, i);
      if (c >= CHANNELS) continue;
      const float4 scale = v_scale[i].floats();
      *(float4*)(p.v_scale + c) = scale;
      *(float4*)(p.v_zero + c) = lowest_levels<VB>(v_zero[i].floats(), scale);
    }
  }
  // V's go to the last threads: the first warps have q.
  static __device__ __forceinline__ int of_thread(const Unit& u, int i) {
    return ((i + 1) * WARPS * 32 - 1 - u.tid) * 4;
  }
};
