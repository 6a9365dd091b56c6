// Runs a packing kernel on a CPU: the threads of a block are fibers that take turns at barriers.
//
// What pack_device.cuh has in assembly is here in C++; all else is the kernel's own source, which
// is compiled behind this file.
#include <cfenv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <ucontext.h>
#include <vector>
using std::isnan;

#define __device__
#define __trap() abort()
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define __align__(bytes) alignas(bytes)
typedef uint32_t u32;
typedef uint16_t u16;
typedef unsigned long long u64;
#define FULL 0xFFFFFFFFu
#define INFINITE INFINITY

struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }

struct Index { unsigned x, y, z; };
static Index blockIdx, threadIdx, gridDim;
alignas(16) static char shared[1 << 18];

static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<u64> board;  // what lanes tell each other
struct Barrier { unsigned arrived, turn; };
static std::vector<Barrier> warps;
static Barrier block;

static unsigned idle;  // rounds of all threads in which no barrier was passed and none ended

static void yield() {
  const unsigned self = threadIdx.x;
  swapcontext(&fibers[self], &scheduler);
  threadIdx.x = self;
}
static void meet(Barrier& at, unsigned count) {
  const unsigned turn = at.turn;
  if (++at.arrived == count) at.arrived = 0, at.turn++, idle = 0;
  while (at.turn == turn) yield();
}
static void __syncwarp() { meet(warps[threadIdx.x / 32], 32); }
static void __syncthreads() { meet(block, fibers.size()); }
static bool __syncthreads_or(bool x) {
  board[threadIdx.x] = x;
  __syncthreads();
  bool y = false;
  for (unsigned i = 0; i < fibers.size(); i++) y |= board[i] != 0;
  __syncthreads();
  return y;
}
#define NAMED_BARRIERS 16
static Barrier named[NAMED_BARRIERS];
static void meet_some(int which, unsigned threads) { meet(named[which], threads); }

template <class T>
static T from_any_lane(T x, unsigned lane) {
  const unsigned first = threadIdx.x / 32 * 32;
  u64 bits = 0;
  memcpy(&bits, &x, sizeof x);
  board[threadIdx.x] = bits;
  __syncwarp();
  bits = board[first + lane];
  __syncwarp();
  memcpy(&x, &bits, sizeof x);
  return x;
}
template <class T>
static T __shfl_sync(u32, T x, int lane) { return from_any_lane(x, lane); }
template <class T>
static T __shfl_xor_sync(u32, T x, int mask) { return from_any_lane(x, threadIdx.x % 32 ^ mask); }
static u32 __reduce_max_sync(u32, u32 x) {
  for (int mask = 16; mask; mask /= 2) {
    const u32 other = __shfl_xor_sync(FULL, x, mask);
    x = x > other ? x : other;
  }
  return x;
}
static u32 __ballot_sync(u32, bool x) {
  u32 y = 0;
  for (int lane = 0; lane < 32; lane++) y |= (u32)__shfl_sync(FULL, (int)x, lane) << lane;
  return y;
}
static u32 __byte_perm(u32 x, u32 y, u32 which) {
  const u64 both = x | (u64)y << 32;
  u32 z = 0;
  for (int i = 0; i < 4; i++) z |= (u32)(both >> 8 * (which >> 4 * i & 7) & 0xFF) << 8 * i;
  return z;
}
static int __popc(u32 x) { return __builtin_popcount(x); }
static int __ffs(u32 x) { return __builtin_ffs(x); }
static u32 __umulhi(u32 a, u32 b) { return (u64)a * b >> 32; }
static void __threadfence() {}
static int atomicAdd(int* at, int x) { const int old = *at; *at += x; return old; }
static int atomicOr(int* at, int x) { const int old = *at; *at |= x; return old; }
template <class T>
static T __ldg(const T* at) { return *at; }
template <class T>
static T __ldcg(const T* at) { return *at; }
static void __stcg(float* at, float x) { *at = x; }
template <class T>
static T min(T a, T b) { return a < b ? a : b; }
static int max(int a, int b) { return a > b ? a : b; }

static float __uint_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
static u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
static float __fsub_rn(float a, float b) { return a - b; }
static float __fdiv_rn(float a, float b) { return a / b; }
static float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// As the device rounds when it is told to.
static float rounded(int mode, float a, float b, float c) {
  const int before = fegetround();
  fesetround(mode);
  volatile float x = a, y = b, z = c;
  const volatile float sum = fmaf(x, y, z);
  fesetround(before);
  return sum;
}
static float __fmaf_ru(float a, float b, float c) { return rounded(FE_UPWARD, a, b, c); }
static float __fmaf_rd(float a, float b, float c) { return rounded(FE_DOWNWARD, a, b, c); }
static float __fadd_rd(float a, float b) { return rounded(FE_DOWNWARD, a, 1, b); }
static float __saturatef(float x) { return x > 0 ? x < 1 ? x : 1 : 0; }
static u32 __float2uint_rd(float x) {
  return !(x > 0) ? 0 : x >= 4294967296.f ? 0xFFFFFFFFu : (u32)floorf(x);
}

static float least(float a, float b) { return isnan(a) || isnan(b) ? NAN : a < b ? a : b; }
static float greatest(float a, float b) { return isnan(a) || isnan(b) ? NAN : a > b ? a : b; }
static float half_to_float(u16 x) { _Float16 y; memcpy(&y, &x, 2); return y; }
static u16 float_to_half(float x) { const _Float16 y = x; u16 z; memcpy(&z, &y, 2); return z; }
// As far off as the device's may be.
static float inverse_fast(float x) { return __uint_as_float(__float_as_uint(1 / x) + 1); }

static u32 shared_address(const void* p) { return (const char*)p - shared; }
template <class T>
static T shared_at(u32 at) { T x; memcpy(&x, shared + at, sizeof x); return x; }
static u32 load_shared(u32 at) { return shared_at<u32>(at); }
static u16 load_shared_half(u32 at) { return shared_at<u16>(at); }
static void load_shared(float* y, u32 at) { memcpy(y, shared + at, 16); }
static void load_shared(u32* y, u32 at) { memcpy(y, shared + at, 8); }
static void store_shared(u32 at, u32 x) { memcpy(shared + at, &x, 4); }
static void store_shared(u32 at, u32 x, u32 y) { store_shared(at, x), store_shared(at + 4, y); }
static void store_shared_half(u32 at, u16 x) { memcpy(shared + at, &x, 2); }
template <int BYTES>
static void copy_async(u32 target, const char* source, bool real) {
  if (real) memcpy(shared + target, source, BYTES); else memset(shared + target, 0, BYTES);
}
static void wait_for_copies() {}

#if INPUT == 2
#define ELEMENT_BYTES 4
struct Pair { float x[2]; };
static float number(Pair a, int half) { return a.x[half]; }
static Pair pair_of(float low, float high) { return {{low, high}}; }
#else
#define ELEMENT_BYTES 2
struct Pair { u32 x; };
static float number(Pair a, int half) {
  const u16 x = half ? a.x >> 16 : a.x;
  return INPUT == 0 ? half_to_float(x) : __uint_as_float((u32)x << 16);
}
static u16 narrow(float x) {
  if (INPUT == 0) return float_to_half(x);
  const u32 bits = __float_as_uint(x);
  return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
}
static Pair pair_of(float low, float high) { return {narrow(low) | (u32)narrow(high) << 16}; }
static u32 at_least(Pair a, Pair b) {
  return (number(a, 0) >= number(b, 0) ? 0xFFFFu : 0) |
         (number(a, 1) >= number(b, 1) ? 0xFFFF0000u : 0);
}
template <bool TURNED>
static void load_matrices(Pair* y, u32 row) {
  const unsigned lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  for (unsigned i = 0; i < 4; i++) {
    u16 halves[2];
    for (unsigned half = 0; half < 2; half++) {
      const unsigned r = TURNED ? 2 * t + half : g, column = TURNED ? g : 2 * t + half;
      halves[half] = shared_at<u16>(from_any_lane(row, 8 * i + r) + 2 * column);
    }
    y[i].x = halves[0] | (u32)halves[1] << 16;
  }
}
#endif
static Pair least(Pair a, Pair b) {
  return pair_of(least(number(a, 0), number(b, 0)), least(number(a, 1), number(b, 1)));
}
static Pair greatest(Pair a, Pair b) {
  return pair_of(greatest(number(a, 0), number(b, 0)), greatest(number(a, 1), number(b, 1)));
}
static Pair load_pair(u32 at) { return shared_at<Pair>(at); }
static Pair halves_of(Pair a, Pair b, int half) { return pair_of(number(a, half), number(b, half)); }
static Pair magnitude(Pair a) { return pair_of(fabsf(number(a, 0)), fabsf(number(a, 1))); }
static Pair from_lane(Pair a, int mask) { return __shfl_xor_sync(FULL, a, mask); }
