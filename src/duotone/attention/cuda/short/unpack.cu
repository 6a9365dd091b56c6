// Dense K and V of spans in canonical order (short/row.cuh): a block of threads per span of K or
// of V of a kv head. Its first warp finds the numbers of every channel, then a thread writes two
// channels of a token at a time.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V, an even number
//   KN4, KN2, KN1, VN4, VN2, VN1, K_RANKED, V_RANKED, K_SMALL, V_SMALL  as in short/decode.cu
//   INPUT     type of dense K and V, 0: fp16, 1: bf16, 2: fp32
//   THREADS, ARGUMENTS_BYTES
#include "packing/device.cuh"
#include "shared/small_floats.cuh"
#include "short/row.cuh"
#include "short/parameters.cuh"

struct Side {
  const unsigned char *codes, *numbers;  // [batch * kv_heads, tokens, bytes of a row], [rows, ..]
  const void *scale, *zero;              // [rows, ..], a row per kv head and span
  char* to;                              // [batch * kv_heads, tokens, CHANNELS]
};
struct Arguments {
  Side key, value;
  const long long* offsets;  // [batch, spans + 1] of tokens
  int kv_heads, spans, tokens;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

// Numbers of every channel, and where its code is in a row. bits: 0 without codes.
struct Channels {
  float scale[CHANNELS], zero[CHANNELS];
  unsigned char byte[CHANNELS], shift[CHANNELS], bits[CHANNELS];

  template <class R, bool SMALL, bool RANKED>
  __device__ __forceinline__ void load(const Side& from, int row, int lane) {
    const ParameterRow<SMALL, false> scales(from.scale, row, R::CODED);
    const ParameterRow<SMALL, true> zeros(from.zero, row, CHANNELS);
    int places[MINE];
    find_places<RANKED>(places, from.numbers, row, lane);
    for (int i = 0; i < MINE; i++) {
      const int c = 32 * i + lane, place = places[i];
      if (c >= CHANNELS) continue;
      const bool coded = place < R::CODED;
      const int width = R::bits(place);
      scale[c] = coded ? scales.number(place) : 0.f, bits[c] = coded ? width : 0;
      const float half_width = __fmul_rn(scale[c], 0.5f * ((1 << width) - 1));
      zero[c] = SMALL ? __fsub_rn(zeros.number(place), half_width) : zeros.number(place);
      if (coded) R::find(place, &byte[c], &shift[c]);
    }
  }
  __device__ __forceinline__ float number(const unsigned char* row, int c) const {
    const u32 code = bits[c] ? row[byte[c]] >> shift[c] & ((1u << bits[c]) - 1) : 0;
    return __fadd_rn(__fmul_rn((float)code, scale[c]), zero[c]);
  }
};

template <class R, bool SMALL, bool RANKED>
__device__ __forceinline__ void unpack(const Arguments& at, const Side& side, int row) {
  __shared__ Channels channels;
  const int head = row / at.spans, span = row - head * at.spans;
  const long long* edge = at.offsets + (long long)(head / at.kv_heads) * (at.spans + 1) + span;
  const int from = (int)edge[0], tokens = (int)edge[1] - from;
  if (tokens == 0) return;  // its parameters may be anything
  if (threadIdx.x < 32) channels.load<R, SMALL, RANKED>(side, row, threadIdx.x);
  __syncthreads();
  const long long first = (long long)head * at.tokens + from;
  const unsigned char* codes = side.codes + first * R::BYTES;
  Pair* to = (Pair*)(side.to + first * CHANNELS * ELEMENT_BYTES);
  for (int i = threadIdx.x; i < tokens * (CHANNELS / 2); i += THREADS) {
    const int token = i / (CHANNELS / 2), c = i % (CHANNELS / 2) * 2;
    const unsigned char* own = codes + token * R::BYTES;
    to[i] = pair_of(channels.number(own, c), channels.number(own, c + 1));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    short_unpack(const __grid_constant__ Arguments at) {
  if (blockIdx.x & 1)
    unpack<Values, V_SMALL, V_RANKED>(at, at.value, blockIdx.x / 2);
  else
    unpack<Keys, K_SMALL, K_RANKED>(at, at.key, blockIdx.x / 2);
}
