// Dense K and V of packed tiles of classes (classes/layout.py), as packing/dense.cuh has it. A
// block finds the scale, lowest level and slot of every channel first.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V, an even number; D: padded to a multiple of 32
//   KN4, KN2, KN1, VN4, VN2, VN1, K_TILES, K_SMALL, V_SMALL  as in classes/decode.cu
//   INPUT     type of dense K and V, 0: fp16, 1: bf16, 2: fp32
//   THREADS   of a block
//   ARGUMENTS_BYTES, TILE_BYTES  sizes of Arguments and of a packed tile on the host
#define D ((CHANNELS + 31) / 32 * 32)
#include "packing/device.cuh"
#include "packing/dense.cuh"
#include "shared/small_floats.cuh"
#include "classes/widths.cuh"
#include "classes/parts.cuh"
static_assert(TILE_BYTES == STORED_TILE_BYTES, "the host's tile differs");

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
__device__ __forceinline__ float number_at(const Table<C, SMALL>& table, const u32* words, int t,
                                           int c) {
  const int slot = table.slot[c];
  return level(slot < 0 ? 0 : code_at<VALUE, C>(words, t, slot), table.scale[c], table.zero[c]);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    class_unpack(const __grid_constant__ Arguments at) {
  __shared__ uint4 codes[ZEROS_AT / 16];
  __shared__ Table<Keys, K_SMALL> keys;
  __shared__ Table<Values, V_SMALL> values;
  const Tile tile(at);
  if (tile.span < 0) return;
  const char* packed = at.packed_tiles + tile.stored * TILE_BYTES;
  copy_words(codes, packed, ZEROS_AT);
  values.load(at.value, tile.row(at));
  if constexpr (K_TILES)
    keys.load_from_tile(packed);
  else
    keys.load(at.key, tile.row(at));
  __syncthreads();
  const u32* k_words = (const u32*)codes;
  const u32* v_words = (const u32*)(codes + VALUES_AT / 16);
  tile.write(at, at.key.to, [&](int t, int c) { return number_at<false>(keys, k_words, t, c); });
  tile.write(at, at.value.to, [&](int t, int c) { return number_at<true>(values, v_words, t, c); });
}
