// Dense K and V of packed tiles of spans (spans/layout.py), as packing/dense.cuh has it. A block
// finds the scale and lowest level of every channel first.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V, an even number; D: padded to a multiple of 32
//   KB, VB, TILES, SMALL_PARAMETERS  as in spans/decode.cu
//   INPUT     type of dense K and V, 0: fp16, 1: bf16, 2: fp32
//   THREADS   of a block
//   ARGUMENTS_BYTES, PACKED_TILE_BYTES  sizes of Arguments and of a packed tile on the host
#define D ((CHANNELS + 31) / 32 * 32)
#include "packing/device.cuh"
#include "packing/dense.cuh"
#include "shared/small_floats.cuh"

// Codes of BITS bits of a tile, in the order of layout.py.
template <int BITS>
struct Codes {
  static constexpr int WORDS = D * BITS / 16, BYTES = WORDS * 128;
  static constexpr int UNIT = WORDS % 4 == 0 ? 4 : WORDS % 2 ? 1 : 2;
  uint4 fours[BYTES / 16];

  __device__ __forceinline__ u32 word(int lane, int n) const {
    return ((const u32*)fours)[(n / UNIT * 32 + lane) * UNIT + n % UNIT];
  }
  // Code of register e at byte j of a lane's words.
  __device__ __forceinline__ u32 code(int lane, int e, int j) const {
    if constexpr (BITS == 3) {  // nibbles of four words in three
      const int first = e / 8 * 3, at = e / 2 % 4, bit = 8 * j + e % 2 * 4;
      const u32 low = word(lane, first + at / 2) >> (bit + at % 2 * 2) & 3;
      return low | (word(lane, first + 2) >> (bit + at) & 1) << 2;
    } else {
      constexpr int PER_BYTE = 8 / BITS;
      return word(lane, e / PER_BYTE) >> (8 * j + e % PER_BYTE * BITS) & ((1u << BITS) - 1);
    }
  }
  __device__ __forceinline__ u32 of_key(int token, int c) const {
    return code(token % 8 * 4 + c % 16 / 4, token / 8 * (D / 16) + c / 16, c % 4);
  }
  __device__ __forceinline__ u32 of_value(int token, int c) const {
    const int row = token / 32 * 4 + token % 16 / 8 * 2 + c % 16 / 8;
    return code(c % 8 * 4 + token % 8 / 2, row * (D / 16) + c / 16,
                token % 2 * 2 + token % 32 / 16);
  }
};

// Scales and lowest levels of the channels of K or of V.
template <int BITS>
struct Levels {
  float scale[CHANNELS], zero[CHANNELS];

  __device__ __forceinline__ void load(const Side& from, long long row) {
    const ParameterRow<SMALL_PARAMETERS, false> scales(from.scale, row, CHANNELS);
    const ParameterRow<SMALL_PARAMETERS, true> zeros(from.zero, row, CHANNELS);
    for (int c = threadIdx.x; c < CHANNELS; c += THREADS) {
      scale[c] = scales.number(c), zero[c] = zeros.number(c);
      const float half_width = __fmul_rn(scale[c], 0.5f * ((1 << BITS) - 1));
      if (SMALL_PARAMETERS) zero[c] = __fsub_rn(zero[c], half_width);
    }
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    span_unpack(const __grid_constant__ Arguments at) {
  __shared__ Codes<KB> key_codes;
  __shared__ Codes<VB> value_codes;
  __shared__ Levels<KB> keys;
  __shared__ Levels<VB> values;
  constexpr int K_BYTES = Codes<KB>::BYTES, V_BYTES = Codes<VB>::BYTES;
  static_assert(TILES * (K_BYTES + V_BYTES) == PACKED_TILE_BYTES, "the host's tile differs");
  const Tile tile(at);
  if (tile.span < 0) return;
  const char* packed = at.packed_tiles + tile.stored / TILES * PACKED_TILE_BYTES;
  const int number = tile.stored % TILES;
  copy_words(key_codes.fours, packed + number * K_BYTES, K_BYTES);
  copy_words(value_codes.fours, packed + TILES * K_BYTES + number * V_BYTES, V_BYTES);
  keys.load(at.key, tile.row(at)), values.load(at.value, tile.row(at));
  __syncthreads();
  tile.write(at, at.key.to, [&](int t, int c) {
    return level(key_codes.of_key(t, c), keys.scale[c], keys.zero[c]);
  });
  tile.write(at, at.value.to, [&](int t, int c) {
    return level(value_codes.of_value(t, c), values.scale[c], values.zero[c]);
  });
}
