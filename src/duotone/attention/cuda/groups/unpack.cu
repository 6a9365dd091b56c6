// Dense K and V of packed tiles by page number (groups/layout.py): a block per page and kv head. It
// copies the page into shared memory, then a thread writes eight channels of a token at a time.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V, a multiple of 8; D: padded to a multiple of 32
//   KB, VB, K_ALONG_K, V_ALONG_K, K_GROUP, V_GROUP, K_SEPARATE, V_SEPARATE  as in groups/decode.cu
//   K_MAPPING, V_MAPPING  1: with signs
//   INPUT     type of dense K and V, 0: fp16, 1: bf16, 2: fp32
//   TILES     tiles of a page
//   THREADS   of a block; ARGUMENTS_BYTES, PAGE_BYTES: sizes of Arguments and of a page on the host
#define D ((CHANNELS + 31) / 32 * 32)
#define TILE 32
#include "packing/device.cuh"
#include "groups/stored.cuh"

// Codes that are stored separately; null: in the pages.
struct Separate {
  const char* codes;  // [heads, head_bytes]
  long long head_bytes;
};
struct Arguments {
  const char* pool;  // [pages of the pool, kv_heads, PAGE_BYTES]
  const int* pages;  // [pages]
  char* to[2];       // K and V, [pages * TILES * TILE, kv_heads, CHANNELS]
  Separate key, value;
  int kv_heads, head_pages;  // head_pages: of each head whose codes are separate
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");
static_assert(TILES * STORED_TILE_BYTES == PAGE_BYTES, "the host's page differs");
#define UNITS (CHANNELS / 8)

// Codes of eight rows by eight k, as lanes of a decoding warp hold them. A row has K numbers.
template <int K, int BITS, bool SIGNS>
struct Codes {
  static constexpr int WORDS = D * BITS / 32, PER_HALF = 16 / BITS;
  static constexpr int UNIT = WORDS % 4 == 0 ? 4 : WORDS % 2 ? 1 : 2;
  const u32* words;
  int bit;

  // With this row and this k among them.
  __device__ __forceinline__ Codes(const u32* tile, int row, int k) {
    const int run = row / 16 * (K / 32) + k / 32, i = row % 16 / 8, q = k % 32 / 8;
    const int number = 8 * run + 4 * i + q;
    const int word = BITS == 1 ? run / 2 : number / PER_HALF;
    words = tile + word / UNIT * 32 * UNIT + word % UNIT;
    bit = BITS == 1 ? 8 * i + 2 * q + run % 2 : BITS * (number % PER_HALF);
  }
  // Codes of row g at k 2 t and 2 t + 1: at bits 0 and 16.
  __device__ __forceinline__ u32 sides(int g, int t) const {
    u32 x = words[(g * 4 + t) * UNIT];
    if (SIGNS) x = x >> 1 | x << 31;
    return x >> bit & (((1 << BITS) - 1) * 0x10001u);
  }
};
__device__ __forceinline__ float level(float code, float scale, float zero) {
  return __fadd_rn(__fmul_rn(code, scale), zero);
}

// The scale of the step that stands for it: upper half of a chunk of 16 k or lower one.
template <int BITS>
__device__ __forceinline__ float scale_of(u16 step, bool upper) {
  const float x = half_to_float(step);
  const float factor = 1.f / (1 << (6 + BITS));
  return step >> 15 ? -x : x * (upper || BITS == 4 ? factor : factor / 4);
}
// Eight channels from c on, where scales run along rows. KeyRows: rows are tokens.
struct KeyRows {
  static __device__ __forceinline__ void unpack(Pair* y, const u32* words, const char* numbers,
                                                int token, int c) {
    const Codes<D, KB, false> codes(words, token, c);
    const bool upper = c % 16 / 8;
    const u16* params = (const u16*)numbers + c / 16 * 32 + upper * 2;
    for (int t = 0; t < 4; t++, params += 8) {
      const u32 both = codes.sides(token % 8, t);
      y[t] = pair_of(
          level(both & 0xFFFF, scale_of<KB>(params[0], upper), half_to_float(params[4])),
          level(both >> 16, scale_of<KB>(params[1], upper), half_to_float(params[5])));
    }
  }
};
// Rows are channels, two tokens are the sides of a word.
struct ValueRows {
  static __device__ __forceinline__ void unpack(Pair* y, const u32* words, const char* numbers,
                                                int token, int c) {
    const Codes<TILE, VB, false> codes(words, c, token);
    const bool upper = token % 16 / 8;
    const int t = token % 8 / 2, side = token % 2;
    const u16* params = (const u16*)numbers + ((c / V_GROUP * 2 + token / 16) * 4 + t) * 8 +
                        upper * 2 + side;
    const float scale = scale_of<VB>(params[0], upper), zero = half_to_float(params[4]);
    for (int j = 0; j < 4; j++) {
      const u32 first = codes.sides(2 * j, t) >> 16 * side & 0xFFFF;
      const u32 second = codes.sides(2 * j + 1, t) >> 16 * side & 0xFFFF;
      y[j] = pair_of(level(first, scale, zero), level(second, scale, zero));
    }
  }
};

// Numbers of a group along k of one row. low, high: words of the lowest bits, with signs.
template <int BITS, bool SIGNS>
struct Run {
  float scale, zero;
  bool has_signs;
  u32 low, high;
  int i;

  // n: row tile * groups of k + group.
  __device__ __forceinline__ Run(const char* numbers, int n, int row) : i(row % 16 / 8) {
    const char* pair = numbers + n / 2 * (SIGNS ? 192 : 128);
    const u32* own = (const u32*)(pair + row % 8 * 16) + n % 2;
    const u16 stored = own[0] >> 16 * i;
    has_signs = SIGNS && stored >> 15;
    scale = half_to_float(stored) * (has_signs ? -0.5f : 1.f);
    zero = has_signs ? 0.f : half_to_float(own[2] >> 16 * i);
    if (SIGNS) low = own[2], high = ((const u32*)(pair + 128 + row % 8 * 8))[n % 2];
  }
  __device__ __forceinline__ float at(u32 code, int k) const {
    const int q = k % 32 / 8, t = k % 8 / 2, place = BITS == 4 ? q % 2 * 4 + q / 2 * 2 : 2 * q;
    float number = code;
    if (SIGNS && has_signs) {
      const u32 lowest = (t < 2 ? low : high) >> (16 * i + k % 2 * 8 + place + t % 2) & 1;
      number = (1 << BITS) - (int)(2 * code + lowest);
    }
    return level(number, scale, zero);
  }
};
// Eight channels from c on, where scales run along k.
struct KeyRuns {
  static __device__ __forceinline__ void unpack(Pair* y, const u32* words, const char* numbers,
                                                int token, int c) {
    const Codes<D, KB, K_MAPPING> codes(words, token, c);
    const Run<KB, K_MAPPING> run(numbers, token / 16 * (D / K_GROUP) + c / K_GROUP, token);
    for (int t = 0; t < 4; t++) {
      const u32 both = codes.sides(token % 8, t);
      y[t] = pair_of(run.at(both & 0xFFFF, c + 2 * t), run.at(both >> 16, c + 2 * t + 1));
    }
  }
};
struct ValueRuns {
  static __device__ __forceinline__ void unpack(Pair* y, const u32* words, const char* numbers,
                                                int token, int c) {
    const Codes<TILE, VB, V_MAPPING> codes(words, c, token);
    const int side = token % 2;
    float x[8];
    for (int j = 0; j < 8; j++) {
      const Run<VB, V_MAPPING> run(numbers, c / 16, c + j);
      x[j] = run.at(codes.sides(j, token % 8 / 2) >> 16 * side & 0xFFFF, token);
    }
    for (int j = 0; j < 4; j++) y[j] = pair_of(x[2 * j], x[2 * j + 1]);
  }
};
template <bool FIRST, class A, class B>
struct Either {
  using type = A;
};
template <class A, class B>
struct Either<false, A, B> {
  using type = B;
};
using Key = Either<K_ALONG_K, KeyRuns, KeyRows>::type;
using Value = Either<V_ALONG_K, ValueRuns, ValueRows>::type;

// Codes of a page that are not in it, after it.
#define K_APART_BYTES (K_SEPARATE * TILES * CODE_BYTES(KB))
#define V_APART_BYTES (V_SEPARATE * TILES * CODE_BYTES(VB))
__device__ __forceinline__ void copy_separate(u32 to, const Separate& from, int bytes, int head,
                                              int page) {
  const char* own = from.codes + head * from.head_bytes;
  for (int n = threadIdx.x; n < bytes / 16; n += THREADS) {
    const long long at = (long long)page * bytes + 16 * n;
    copy_async<16>(to + 16 * n, own + at, at < from.head_bytes);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    group_unpack(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(16) char shared[];
  const int place = blockIdx.x / at.kv_heads, head = blockIdx.x - place * at.kv_heads;
  const char* page = at.pool + ((long long)at.pages[place] * at.kv_heads + head) * PAGE_BYTES;
  for (int n = threadIdx.x; n < PAGE_BYTES / 16; n += THREADS)
    copy_async<16>(shared_address(shared) + 16 * n, page + 16 * n, true);
  if (K_SEPARATE || V_SEPARATE) {
    const int of_head = place / at.head_pages, number = place % at.head_pages;
    const u32 apart = shared_address(shared) + PAGE_BYTES;
    copy_separate(apart, at.key, K_APART_BYTES, of_head, number);
    copy_separate(apart + K_APART_BYTES, at.value, V_APART_BYTES, of_head, number);
  }
  wait_for_copies();
  __syncthreads();
  for (int n = threadIdx.x; n < 2 * TILES * TILE * UNITS; n += THREADS) {
    const int row = n / UNITS, c = n % UNITS * 8, is_value = row / (TILES * TILE);
    const int token = row % (TILES * TILE), number = token / TILE;
    const char* tile = shared + number * STORED_TILE_BYTES;
    const char* params = tile + K_OWN_BYTES + V_OWN_BYTES;
    const char* k_codes = K_SEPARATE ? shared + PAGE_BYTES + number * CODE_BYTES(KB) : tile;
    const char* v_codes = V_SEPARATE
                              ? shared + PAGE_BYTES + K_APART_BYTES + number * CODE_BYTES(VB)
                              : tile + K_OWN_BYTES;
    __align__(16) Pair y[4];
    if (is_value)
      Value::unpack(y, (const u32*)v_codes, params + K_PARAM_BYTES, token % TILE, c);
    else
      Key::unpack(y, (const u32*)k_codes, params, token % TILE, c);
    const long long to = ((long long)place * TILES * TILE + token) * at.kv_heads + head;
    char* target = at.to[is_value] + (to * CHANNELS + c) * ELEMENT_BYTES;
    for (int i = 0; i < (int)sizeof(y) / 16; i++) ((uint4*)target)[i] = ((uint4*)y)[i];
  }
}
