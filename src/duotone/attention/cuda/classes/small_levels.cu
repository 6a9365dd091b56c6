// Rounds levels of classes to rows of 8 bits (quant/small_floats.py), a warp per row. Middles of
// the levels take the place of zero-points.
//
// Compiled by NVRTC with these macros:
//   CHANNELS    channels of the tensor
//   N4, N2, N1  how many of them have 4, 2 and 1 bits
//   INPUT       0: levels are fp16
//   WARPS       of a block
//   ARGUMENTS_BYTES  size of Arguments on the host
#include "packing/device.cuh"
#define CODED (N4 + N2 + N1)

// Levels of K's or V's blocks by rank, and where their bytes go.
struct Arguments {
  const u16 *scale, *zero;              // [rows, CODED], [rows, CHANNELS]
  unsigned char *scale_row, *zero_row;  // with an exponent first
  int rows;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

// floor(log2(x)) of a number that is not negative; below all others at 0.
__device__ __forceinline__ int exponent_of(float x) {
  return (int)(__float_as_uint(x) >> 23) - 127;
}
__device__ __forceinline__ float power_of_2(int exponent) {
  return __uint_as_float((u32)(exponent + 127) << 23);
}
__device__ __forceinline__ float largest_of_warp(float x) {
#pragma unroll
  for (int mask = 16; mask; mask /= 2) x = greatest(x, __shfl_xor_sync(FULL, x, mask));
  return x;
}

// Codes of a row. BINADES: from the lowest normal number to the largest one.
template <int BINADES, bool SIGNED>
struct SmallFloats {
  int lowest;
  u32 first;  // exponent of the row; 255: it is not finite

  __device__ __forceinline__ explicit SmallFloats(float top) {
    const int shared = min(max(exponent_of(top), BINADES - 20), 15);
    lowest = shared - BINADES;
    first = top < INFINITE ? shared + 141 - BINADES : 255;
  }
  static __device__ __forceinline__ float size(float x) {
    return SIGNED ? fabsf(x) : x < 0.f ? 0.f : x;
  }
  __device__ __forceinline__ u32 code(float x) const {
    const int exponent = max(exponent_of(size(x)), lowest);
    const int steps = (int)rintf(size(x) * power_of_2(4 - exponent));
    const int code = min((exponent - lowest) * 16 + steps, SIGNED ? 127 : 255);
    return SIGNED && x < 0.f && code ? code | 128 : code;
  }
};
typedef SmallFloats<14, false> Scales;
typedef SmallFloats<6, true> Zeros;

extern "C" __global__ void __launch_bounds__(WARPS * 32)
    small_levels(const __grid_constant__ Arguments at) {
  constexpr int OWN = (CHANNELS + 31) / 32;
  const int lane = threadIdx.x & 31, row = blockIdx.x * WARPS + (threadIdx.x >> 5);
  if (row >= at.rows) return;
  const u16 *scale = at.scale + (size_t)row * CODED, *zero = at.zero + (size_t)row * CHANNELS;
  unsigned char* scale_row = at.scale_row + (size_t)row * (CODED + 1);
  unsigned char* zero_row = at.zero_row + (size_t)row * (CHANNELS + 1);
  float top = 0.f, zeros[OWN];
  for (int rank = lane; rank < CODED; rank += 32)
    top = greatest(top, Scales::size(half_to_float(scale[rank])));
  const Scales scales(largest_of_warp(top));
  top = 0.f;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int rank = lane + 32 * i;
    zeros[i] = rank < CHANNELS ? half_to_float(zero[rank]) : 0.f;
    if (rank < CODED) {
      const float x = half_to_float(scale[rank]);
      // Half the largest code of steps above the lowest level.
      const float half_top = rank < N4 ? 7.5f : rank < N4 + N2 ? 1.5f : 0.5f;
      zeros[i] = __fadd_rn(zeros[i], x * half_top);
      scale_row[1 + rank] = (unsigned char)scales.code(x);
    }
    top = greatest(top, Zeros::size(zeros[i]));
  }
  const Zeros rounded(largest_of_warp(top));
#pragma unroll
  for (int i = 0; i < OWN; i++)
    if (lane + 32 * i < CHANNELS)
      zero_row[1 + lane + 32 * i] = (unsigned char)rounded.code(zeros[i]);
  if (lane == 0)
    scale_row[0] = (unsigned char)scales.first, zero_row[0] = (unsigned char)rounded.first;
}
