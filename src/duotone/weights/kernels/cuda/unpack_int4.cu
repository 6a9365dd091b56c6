// Codes of 4 bits times 16 as int8: two nibbles of a byte are neighbouring columns, the low one
// first. A thread has 16 bytes.
//
// Compiled by NVRTC with these macros:
//   THREADS          of a block
//   ARGUMENTS_BYTES  size of Arguments on the host
typedef unsigned int u32;

struct Arguments {
  const uint4* packed;  // [sixteens]
  uint4* codes;         // [2 * sixteens]
  long long sixteens;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host has other arguments");

__device__ __forceinline__ uint2 bytes_of(u32 nibbles) {
  const u32 low = nibbles << 4 & 0xF0F0F0F0, high = nibbles & 0xF0F0F0F0;
  return make_uint2(__byte_perm(low, high, 0x5140), __byte_perm(low, high, 0x7362));
}

extern "C" __global__ void __launch_bounds__(THREADS)
    unpack_int4(const __grid_constant__ Arguments at) {
  const long long n = (long long)blockIdx.x * THREADS + threadIdx.x;
  if (n >= at.sixteens) return;
  const uint4 packed = at.packed[n];
  const uint2 x = bytes_of(packed.x), y = bytes_of(packed.y);
  const uint2 z = bytes_of(packed.z), w = bytes_of(packed.w);
  at.codes[2 * n] = make_uint4(x.x, x.y, y.x, y.y);
  at.codes[2 * n + 1] = make_uint4(z.x, z.y, w.x, w.y);
}
