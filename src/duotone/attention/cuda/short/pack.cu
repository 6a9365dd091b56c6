// Packs K or V of short spans by given levels, in canonical order (short/row.cuh): a block of
// threads per span of a kv head, a thread per byte.
//
// Compiled by NVRTC with these macros:
//   CHANNELS    channels of the tensor
//   N4, N2, N1  how many of them have codes of 4, 2 and 1 bits; RANKED: which ones differs by span
//   INPUT       type of the tensor, 0: fp16, 1: bf16, 2: fp32
//   THREADS, ARGUMENTS_BYTES
#define D CHANNELS
#define ALIGN 2  // elements are read one by one
#include "packing/device.cuh"
#include "packing/levels.cuh"
#include "packing/tile.cuh"
#include "short/row.cuh"

typedef Row<N4, N2, N1> Codes;
#define NUMBER_BYTES ((CHANNELS + 3) / 4)

struct Arguments {
  Dense x;
  const long long* offsets;  // [batch, spans + 1] of tokens
  const long long* order;    // [rows, CHANNELS] channels by place; a row per kv head and span
  const u16 *scale, *zero;   // [rows, coded] by place
  unsigned char* codes;      // [batch * kv_heads, tokens, bytes of a row]
  unsigned char* numbers;    // [rows, NUMBER_BYTES] classes of channels; RANKED
  int kv_heads, spans, tokens;
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

// Levels by place, and the channel that has them.
struct Places {
  float scale[Codes::CODED], zero[Codes::CODED], inverse[Codes::CODED];
  int offset[Codes::CODED];  // bytes into a token
  unsigned char number[4 * NUMBER_BYTES];
};

// Number of the class of a place: those with channels count, the widest first, no codes last.
__device__ __forceinline__ int class_of(int place) {
  return (N4 && place >= N4) + (N2 && place >= N4 + N2) + (N1 && place >= Codes::CODED);
}
__device__ __forceinline__ float load_element(const char* at) {
#if INPUT == 2
  return *(const float*)at;
#else
  const Pair x = {*(const u16*)at};
  return number(x, 0);
#endif
}
// Codes of one byte, from place `first` on.
template <int BITS>
__device__ __forceinline__ u32 pack_byte(const Places& places, const char* token, int first,
                                         int end) {
  u32 byte = 0;
#pragma unroll
  for (int e = 0; e < 8 / BITS; e++) {
    const int place = first + e;
    if (place >= end) break;
    Levels l;
    l.scale = places.scale[place], l.zero = places.zero[place], l.inverse = places.inverse[place];
    byte |= l.template code<BITS>(load_element(token + places.offset[place]))
            << (8 - BITS * (1 + e));
  }
  return byte;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    short_pack(const __grid_constant__ Arguments at) {
  __shared__ Places places;
  const int row = blockIdx.x, head = row / at.spans, sequence = head / at.kv_heads;
  const long long* edge = at.offsets + (long long)sequence * (at.spans + 1) + row % at.spans;
  const int from = (int)edge[0], tokens = (int)edge[1] - from, tid = threadIdx.x;
  const bool empty = tokens == 0;  // its order may be anything
  for (int i = tid; i < 4 * NUMBER_BYTES; i += THREADS) places.number[i] = 0;
  __syncthreads();
  for (int place = tid; !empty && place < CHANNELS; place += THREADS) {
    const int channel = (int)at.order[(long long)row * CHANNELS + place];
    places.number[channel] = class_of(place);
    if (place >= Codes::CODED) continue;
    const long long i = (long long)row * Codes::CODED + place;
    Levels l;
    l.read(at.scale[i], at.zero[i]);
    places.scale[place] = l.scale, places.zero[place] = l.zero, places.inverse[place] = l.inverse;
    places.offset[place] = channel * ELEMENT_BYTES;
  }
  __syncthreads();
  for (int i = tid; RANKED && i < NUMBER_BYTES; i += THREADS) {
    const unsigned char* of = places.number + 4 * i;
    at.numbers[(long long)row * NUMBER_BYTES + i] = of[0] << 6 | of[1] << 4 | of[2] << 2 | of[3];
  }
  const char* x = at.x.data + sequence * at.x.batch + head % at.kv_heads * at.x.head;
  unsigned char* codes = at.codes + ((long long)head * at.tokens + from) * Codes::BYTES;
  for (int i = tid; i < tokens * Codes::BYTES; i += THREADS) {
    const int token = i / Codes::BYTES, byte = i % Codes::BYTES;
    const char* own = x + (long long)(from + token) * at.x.token;
    u32 y;
    if (byte < Codes::B4)
      y = pack_byte<4>(places, own, 2 * byte, N4);
    else if (byte < Codes::B4 + Codes::B2)
      y = pack_byte<2>(places, own, N4 + 4 * (byte - Codes::B4), N4 + N2);
    else
      y = pack_byte<1>(places, own, N4 + N2 + 8 * (byte - Codes::B4 - Codes::B2), Codes::CODED);
    codes[i] = (unsigned char)y;
  }
}
