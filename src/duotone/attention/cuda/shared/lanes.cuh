// Sums and maxima over the lanes of a warp.
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(FULL, x, o);
  return x;
}
// Largest number of the lanes. None is negative: their bits order as they do.
__device__ __forceinline__ float most_of_lanes(float x) {
  return __uint_as_float(__reduce_max_sync(FULL, __float_as_uint(x)));
}
