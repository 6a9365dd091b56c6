// Instructions that packing kernels use, and pairs of elements: two halves of a register, or two
// floats.
//
// Expects INPUT (0: fp16, 1: bf16, 2: fp32). Minima and maxima of anything with a NaN are NaN, as
// torch has them.
typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define FULL 0xFFFFFFFFu
#define INFINITE __int_as_float(0x7f800000)

__device__ __forceinline__ u32 shared_address(const void* p) {
  return (u32)__cvta_generic_to_shared(p);
}
__device__ __forceinline__ float least(float a, float b) {
  float y;
  asm("min.NaN.f32 %0,%1,%2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float greatest(float a, float b) {
  float y;
  asm("max.NaN.f32 %0,%1,%2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
}
__device__ __forceinline__ float half_to_float(u16 x) {
  float y;
  asm("cvt.f32.f16 %0,%1;" : "=f"(y) : "h"(x));
  return y;
}
__device__ __forceinline__ u16 float_to_half(float x) {
  u16 y;
  asm("cvt.rn.f16.f32 %0,%1;" : "=h"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float inverse_fast(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x));
  return y;
}
// Threads that are a multiple of 32, at barrier `which`; `__syncthreads` has barrier 0.
#define NAMED_BARRIERS 16
__device__ __forceinline__ void meet_some(int which, int threads) {
  asm volatile("bar.sync %0,%1;" ::"r"(which), "r"(threads) : "memory");
}
// BYTES 4, 8 or 16 from global to shared memory, without registers; zeros where not `real`.
template <int BYTES>
__device__ __forceinline__ void copy_async(u32 target, const char* source, bool real) {
  const int bytes = real ? BYTES : 0;
  if constexpr (BYTES == 16)
    asm volatile("cp.async.cg.shared.global [%0],[%1],16,%2;" ::"r"(target), "l"(source), "r"(bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0],[%1],%3,%2;" ::"r"(target), "l"(source),
                 "r"(bytes), "n"(BYTES)
                 : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
__device__ __forceinline__ u32 load_shared(u32 at) {
  u32 y;
  asm volatile("ld.shared.u32 %0,[%1];" : "=r"(y) : "r"(at) : "memory");
  return y;
}
__device__ __forceinline__ u16 load_shared_half(u32 at) {
  u16 y;
  asm volatile("ld.shared.u16 %0,[%1];" : "=h"(y) : "r"(at) : "memory");
  return y;
}
__device__ __forceinline__ void load_shared(float* y, u32 at) {
  asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3},[%4];"
               : "=f"(y[0]), "=f"(y[1]), "=f"(y[2]), "=f"(y[3])
               : "r"(at)
               : "memory");
}
__device__ __forceinline__ void load_shared(u32* y, u32 at) {
  asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(y[0]), "=r"(y[1]) : "r"(at) : "memory");
}
__device__ __forceinline__ void store_shared(u32 at, u32 x) {
  asm volatile("st.shared.u32 [%0],%1;" ::"r"(at), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared(u32 at, u32 x, u32 y) {
  asm volatile("st.shared.v2.u32 [%0],{%1,%2};" ::"r"(at), "r"(x), "r"(y) : "memory");
}
__device__ __forceinline__ void store_shared_half(u32 at, u16 x) {
  asm volatile("st.shared.u16 [%0],%1;" ::"r"(at), "h"(x) : "memory");
}

#if INPUT == 2
#define ELEMENT_BYTES 4
struct Pair {
  float x[2];
};
__device__ __forceinline__ Pair least(Pair a, Pair b) {
  return {{least(a.x[0], b.x[0]), least(a.x[1], b.x[1])}};
}
__device__ __forceinline__ Pair greatest(Pair a, Pair b) {
  return {{greatest(a.x[0], b.x[0]), greatest(a.x[1], b.x[1])}};
}
__device__ __forceinline__ Pair magnitude(Pair a) {
  return {{fabsf(a.x[0]), fabsf(a.x[1])}};
}
__device__ __forceinline__ Pair from_lane(Pair a, int mask) {
  return {{__shfl_xor_sync(FULL, a.x[0], mask), __shfl_xor_sync(FULL, a.x[1], mask)}};
}
__device__ __forceinline__ float number(Pair a, int half) {
  return a.x[half];
}
__device__ __forceinline__ Pair pair_of(float low, float high) {
  return {{low, high}};
}
__device__ __forceinline__ Pair load_pair(u32 at) {
  return {{__uint_as_float(load_shared(at)), __uint_as_float(load_shared(at + 4))}};
}
__device__ __forceinline__ Pair halves_of(Pair a, Pair b, int half) {
  return {{a.x[half], b.x[half]}};
}
#else
#define ELEMENT_BYTES 2
struct Pair {
  u32 x;
};
#if INPUT == 0
#define OF_PAIR "f16x2"
#else
#define OF_PAIR "bf16x2"
#endif
__device__ __forceinline__ Pair least(Pair a, Pair b) {
  Pair y;
  asm("min.NaN." OF_PAIR " %0,%1,%2;" : "=r"(y.x) : "r"(a.x), "r"(b.x));
  return y;
}
__device__ __forceinline__ Pair greatest(Pair a, Pair b) {
  Pair y;
  asm("max.NaN." OF_PAIR " %0,%1,%2;" : "=r"(y.x) : "r"(a.x), "r"(b.x));
  return y;
}
__device__ __forceinline__ Pair magnitude(Pair a) {
  return {a.x & 0x7FFF7FFFu};
}
__device__ __forceinline__ Pair from_lane(Pair a, int mask) {
  return {__shfl_xor_sync(FULL, a.x, mask)};
}
__device__ __forceinline__ float number(Pair a, int half) {
#if INPUT == 0
  return half_to_float((u16)(half ? a.x >> 16 : a.x));
#else
  return __uint_as_float(half ? a.x & 0xFFFF0000u : a.x << 16);
#endif
}
__device__ __forceinline__ Pair pair_of(float low, float high) {
  Pair y;
  asm("cvt.rn." OF_PAIR ".f32 %0,%1,%2;" : "=r"(y.x) : "f"(high), "f"(low));
  return y;
}
__device__ __forceinline__ Pair load_pair(u32 at) {
  return {load_shared(at)};
}
// One half of two pairs.
__device__ __forceinline__ Pair halves_of(Pair a, Pair b, int half) {
  return {__byte_perm(a.x, b.x, half ? 0x7632 : 0x5410)};
}
// All ones in the halves in which a is b or more, and nothing where either is not a number.
__device__ __forceinline__ u32 at_least(Pair a, Pair b) {
#if INPUT == 0 || __CUDA_ARCH__ >= 900
  u32 y;
  asm("set.ge.u32." OF_PAIR " %0,%1,%2;" : "=r"(y) : "r"(a.x), "r"(b.x));
  return y;
#else
  return (number(a, 0) >= number(b, 0) ? 0xFFFFu : 0) |
         (number(a, 1) >= number(b, 1) ? 0xFFFF0000u : 0);
#endif
}
// Four 8x8 matrices of halves from rows that lanes 0-7, 8-15, .. point at, or their transposes.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(Pair* y, u32 row) {
  if constexpr (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(y[0].x), "=r"(y[1].x), "=r"(y[2].x), "=r"(y[3].x)
                 : "r"(row)
                 : "memory");
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(y[0].x), "=r"(y[1].x), "=r"(y[2].x), "=r"(y[3].x)
                 : "r"(row)
                 : "memory");
}
#endif
