// Dense K and V of packed tiles by page number (groups/layout.py): a block per page and kv head. It
// copies the page into shared memory, then a thread writes eight channels of a token at a time.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V, a multiple of 32
//   KB, VB    bits of codes, 2 or 4
//   V_GROUP   channels of a group of V; groups of K have 32 tokens or more
//   INPUT     type of dense K and V, 0: fp16, 1: bf16, 2: fp32
//   TILES     tiles of a page
//   THREADS   of a block; ARGUMENTS_BYTES, PAGE_BYTES: sizes of Arguments and of a page on the host
#define D CHANNELS
#define TILE 32
#include "packing/device.cuh"

struct Arguments {
  const char* pool;   // [pages of the pool, kv_heads, PAGE_BYTES]
  const int* pages;   // [pages]
  char* to[2];        // K and V, [pages * TILES * TILE, kv_heads, CHANNELS]
  int kv_heads;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

#define CODE_BYTES(BITS) (TILE * D * (BITS) / 8)
#define K_PARAM_BYTES (D * 4)
#define V_PARAM_BYTES (TILE * (D / V_GROUP) * 4)
#define OWN_TILE_BYTES (CODE_BYTES(KB) + CODE_BYTES(VB) + K_PARAM_BYTES + V_PARAM_BYTES)
static_assert(TILES * OWN_TILE_BYTES == PAGE_BYTES, "the host's page differs");
#define UNITS (D / 8)

// Codes of a tile, as lanes of a decoding warp hold them. number: of a code of its lane and side.
template <int BITS>
struct Codes {
  static constexpr int WORDS = D * BITS / 32, PER_HALF = 16 / BITS;
  static constexpr int UNIT = WORDS % 4 == 0 ? 4 : WORDS % 2 ? 1 : 2;
  const u32* words;

  // Code `number` of a lane and its neighbour of side 1, at bits 0 and 16.
  __device__ __forceinline__ u32 sides(int lane, int number) const {
    const int word = number / PER_HALF;
    const u32 x = words[(word / UNIT * 32 + lane) * UNIT + word % UNIT];
    return x >> BITS * (number % PER_HALF) & (((1 << BITS) - 1) * 0x10001u);
  }
};
// The scale of the step that stands for it: upper half of a chunk of 16 k or lower one.
template <int BITS>
__device__ __forceinline__ float scale_of(u16 step, bool upper) {
  const float x = half_to_float(step);
  const float factor = 1.f / (1 << (6 + BITS));
  return step >> 15 ? -x : x * (upper || BITS == 4 ? factor : factor / 4);
}
__device__ __forceinline__ Pair levels_of(u32 first, u32 second, float scale, float next_scale,
                                          float zero, float next_zero) {
  return pair_of(__fadd_rn(__fmul_rn((float)first, scale), zero),
                 __fadd_rn(__fmul_rn((float)second, next_scale), next_zero));
}

// Channels from c on of a token of K: rows are tokens, two channels are the sides of a word.
__device__ __forceinline__ void unpack_key(Pair* y, const char* tile, int token, int c) {
  const Codes<KB> codes = {(const u32*)tile};
  const int number = 8 * (token / 16 * (D / 32) + c / 32) + token % 16 / 8 * 4 + c % 32 / 8;
  const bool upper = c % 16 / 8;
  const u16* params =
      (const u16*)(tile + CODE_BYTES(KB) + CODE_BYTES(VB)) + c / 16 * 32 + upper * 2;
  for (int t = 0; t < 4; t++, params += 8) {
    const u32 both = codes.sides(token % 8 * 4 + t, number);
    y[t] = levels_of(both & 0xFFFF, both >> 16, scale_of<KB>(params[0], upper),
                     scale_of<KB>(params[1], upper), half_to_float(params[4]),
                     half_to_float(params[5]));
  }
}
// Channels of a token of V: rows are channels, two tokens are the sides of a word.
__device__ __forceinline__ void unpack_value(Pair* y, const char* tile, int token, int c) {
  const Codes<VB> codes = {(const u32*)(tile + CODE_BYTES(KB))};
  const int number = 8 * (c / 16) + c % 16 / 8 * 4 + token / 8;
  const int t = token % 8 / 2, side = token % 2;
  const bool upper = token % 16 / 8;
  const u16* params = (const u16*)(tile + CODE_BYTES(KB) + CODE_BYTES(VB) + K_PARAM_BYTES) +
                      ((c / V_GROUP * 2 + token / 16) * 4 + t) * 8 + upper * 2 + side;
  const float scale = scale_of<VB>(params[0], upper), zero = half_to_float(params[4]);
  for (int j = 0; j < 4; j++) {
    const u32 first = codes.sides(8 * j + t, number) >> 16 * side & 0xFFFF;
    const u32 second = codes.sides(8 * j + 4 + t, number) >> 16 * side & 0xFFFF;
    y[j] = levels_of(first, second, scale, scale, zero, zero);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    group_unpack(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(16) char shared[];
  const int place = blockIdx.x / at.kv_heads, head = blockIdx.x - place * at.kv_heads;
  const char* page = at.pool + ((long long)at.pages[place] * at.kv_heads + head) * PAGE_BYTES;
  for (int n = threadIdx.x; n < PAGE_BYTES / 16; n += THREADS)
    copy_async<16>(shared_address(shared) + 16 * n, page + 16 * n, true);
  wait_for_copies();
  __syncthreads();
  for (int n = threadIdx.x; n < 2 * TILES * TILE * UNITS; n += THREADS) {
    const int row = n / UNITS, c = n % UNITS * 8, is_value = row / (TILES * TILE);
    const int token = row % (TILES * TILE);
    const char* tile = shared + token / TILE * OWN_TILE_BYTES;
    __align__(16) Pair y[4];
    if (is_value)
      unpack_value(y, tile, token % TILE, c);
    else
      unpack_key(y, tile, token % TILE, c);
    const long long to = ((long long)place * TILES * TILE + token) * at.kv_heads + head;
    char* target = at.to[is_value] + (to * D + c) * ELEMENT_BYTES;
    for (int i = 0; i < (int)sizeof(y) / 16; i++) ((uint4*)target)[i] = ((uint4*)y)[i];
  }
}
