// Dense K and V of class records (classes/layout.py): a block per tile and kv head. It finds the
// scale, lowest level and slot of every channel, then a thread writes two channels of a token at a
// time.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V, an even number; D: padded to a multiple of 32
//   KN4, KN2, KN1, VN4, VN2, VN1, K_TILES, K_SMALL, V_SMALL  as in classes/decode.cu
//   INPUT     type of dense K and V, 0: fp16, 1: bf16, 2: fp32
//   THREADS   of a block
//   ARGUMENTS_BYTES, TILE_BYTES  sizes of Arguments and of a packed tile on the host
#define D ((CHANNELS + 31) / 32 * 32)
#include "packing/device.cuh"
#include "shared/small_floats.cuh"
#include "classes/widths.cuh"
#include "classes/parts.cuh"
static_assert(TILE_BYTES == STORED_TILE_BYTES, "the host's tile differs");

// Parameters of spans, sorted by class, and where the tokens go.
struct Side {
  const void *scale, *zero;    // [batch * kv_heads, spans, ..]: fp16, or rows of 8 bits
  const unsigned char* order;  // [batch * kv_heads, spans, CHANNELS]
  char* to;                    // [batch * kv_heads, tokens, CHANNELS]
};
struct Arguments {
  Side key, value;           // K's parameters are null with K_TILES
  const char* packed_tiles;  // [batch * kv_heads, stored, TILE_BYTES], of which tiles hold tokens
  const int *token, *span;   // [batch, tiles * 64] and [batch, tiles]; -1: none
  int kv_heads, tiles, stored, tokens, spans;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

// Numbers of the channels of K or of V. slot: -1 without codes.
template <class C, bool SMALL>
struct Table {
  float scale[CHANNELS], zero[CHANNELS];
  short slot[CHANNELS];

  // start: zero-point, or middle of the levels.
  __device__ __forceinline__ void put(int channel, int rank, float step, float start) {
    slot[channel] = C::slot(rank);
    scale[channel] = step;
    const float half_width = __fmul_rn(step, 0.5f * C::top(rank));
    zero[channel] = SMALL ? __fsub_rn(start, half_width) : start;
  }
  __device__ __forceinline__ void load(const Side& from, long long row) {
    const ParameterRow<SMALL, false> scales(from.scale, row, C::CODED);
    const ParameterRow<SMALL, true> zeros(from.zero, row, CHANNELS);
    for (int rank = threadIdx.x; rank < CHANNELS; rank += THREADS)
      put(from.order[row * CHANNELS + rank], rank, rank < C::CODED ? scales.number(rank) : 0.f,
          zeros.number(rank));
  }
  // Number `i` of a part of a tile. factor: of the part in 8 bits.
  template <bool SIGNED>
  static __device__ __forceinline__ float number(const char* part, int i, float factor) {
    if constexpr (!SMALL) return half_to_float(((const u16*)part)[i]);
    return half_to_float(small_half<SIGNED>((unsigned char)part[i])) * factor;
  }
  // K's own.
  __device__ __forceinline__ void load_from_tile(const char* tile) {
    const unsigned char* exponents = (const unsigned char*)tile + EXPONENTS_AT;
    const float of_scales = SMALL ? small_factor(exponents[0]) : 1.f;
    const float of_zeros = SMALL ? small_factor(exponents[1]) : 1.f;
    for (int c = threadIdx.x; c < CHANNELS; c += THREADS)
      put(c, C::CODED, 0.f, number<true>(tile + ZEROS_AT, c, of_zeros));
    __syncthreads();
    for (int rank = threadIdx.x; rank < C::CODED; rank += THREADS) {
      const int at = C::slot(rank), c = (unsigned char)tile[CHANNELS_AT + at];
      put(c, rank, number<false>(tile + SCALES_AT, at, of_scales), zero[c]);
    }
  }
};

// Code of a token at a slot. Registers are those of classes/packer.cuh.
template <bool VALUE, class C>
__device__ __forceinline__ u32 code_at(const u32* words, int token, int slot) {
  constexpr int UNIT = C::WORDS % 4 == 0 ? 4 : C::WORDS % 2 ? 1 : 2;
  const int column = slot / 16, bits = C::bits(column), whole = C::whole(bits);
  const int within = column - C::first_column(bits), half = token / 32;
  const bool is_half = within == whole;
  int i, lane, j;
  if (VALUE)
    i = token % 16 / 8 * 2 + slot % 16 / 8, lane = slot % 8 * 4 + token % 8 / 2,
    j = token % 2 * 2 + token % 32 / 16;
  else
    i = token % 32 / 8, lane = token % 8 * 4 + slot % 16 / 4 + (is_half ? 2 * half : 0),
    j = slot % 4;
  const int of_half = VALUE ? 2 * half + i / 2 : i;
  const int bit = bits * (is_half ? 8 * whole + of_half : (4 * half + i) * whole + within);
  const int word = C::first_word(bits) + bit / 8;
  const u32 four = words[(word / UNIT * 32 + lane) * UNIT + word % UNIT];
  return four >> (bit % 8 + 8 * j) & ((1 << bits) - 1);
}

template <bool VALUE, class C, bool SMALL>
__device__ __forceinline__ void write_tokens(const Table<C, SMALL>& table, const u32* words,
                                             const int* token, char* to) {
  for (int n = threadIdx.x; n < 64 * (CHANNELS / 2); n += THREADS) {
    const int t = n / (CHANNELS / 2), c = n % (CHANNELS / 2) * 2;
    if (token[t] < 0) continue;
    float x[2];
    for (int i = 0; i < 2; i++) {
      const int slot = table.slot[c + i];
      const float code = slot < 0 ? 0.f : (float)code_at<VALUE, C>(words, t, slot);
      x[i] = __fadd_rn(__fmul_rn(code, table.scale[c + i]), table.zero[c + i]);
    }
    *(Pair*)(to + ((long long)token[t] * CHANNELS + c) * ELEMENT_BYTES) = pair_of(x[0], x[1]);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    class_unpack(const __grid_constant__ Arguments at) {
  __shared__ uint4 codes[ZEROS_AT / 16];
  __shared__ Table<Keys, K_SMALL> keys;
  __shared__ Table<Values, V_SMALL> values;
  __shared__ int token[64];
  const int head = blockIdx.x / at.tiles, of_head = blockIdx.x - head * at.tiles;
  const long long of_sequence = (long long)(head / at.kv_heads) * at.tiles + of_head;
  const int span = at.span[of_sequence];
  if (span < 0) return;
  const char* tile = at.packed_tiles + ((long long)head * at.stored + of_head) * TILE_BYTES;
  for (int n = threadIdx.x; n < ZEROS_AT / 16; n += THREADS)
    codes[n] = ((const uint4*)tile)[n];
  if (threadIdx.x < 64) token[threadIdx.x] = at.token[of_sequence * 64 + threadIdx.x];
  const long long row = (long long)head * at.spans + span;
  values.load(at.value, row);
  if constexpr (K_TILES)
    keys.load_from_tile(tile);
  else
    keys.load(at.key, row);
  __syncthreads();
  const long long first = (long long)head * at.tokens * CHANNELS * ELEMENT_BYTES;
  write_tokens<false>(keys, (const u32*)codes, token, at.key.to + first);
  write_tokens<true>(values, (const u32*)(codes + VALUES_AT / 16), token, at.value.to + first);
}
