// Parameters of spans in canonical order, and codes as floats.
//
// Expects row.cuh, and KN4, KN2, KN1, VN4, VN2, VN1: channels of each width.
typedef Row<KN4, KN2, KN1> Keys;
typedef Row<VN4, VN2, VN1> Values;

// 1 + code / 2^bits is a float whose upper digits are the code: no conversion. `up`: from the place
// of the code in its byte to that of the digits.
#define ONE 0x3F800000u
__device__ __forceinline__ float near_one(u32 byte, int up, u32 mask) {
  return __uint_as_float(byte << up & mask | ONE);
}
// Where code number e of a byte stands, and its digits.
__device__ constexpr int up_of(int bits, int e) { return 15 + bits * e; }
__device__ constexpr u32 mask_of(int bits) { return ((1u << bits) - 1) << (23 - bits); }

#define MINE ((CHANNELS + 31) / 32)  // channels of a lane: 32 i + lane

// Places of a lane's channels, by the class numbers of row `row` of blocks.
template <bool RANKED>
__device__ __forceinline__ void find_places(int* place, const unsigned char* numbers, int row,
                                            int lane) {
  if (!RANKED) {
#pragma unroll
    for (int i = 0; i < MINE; i++) place[i] = 32 * i + lane;
    return;
  }
  const unsigned char* of = numbers + (size_t)row * ((CHANNELS + 3) / 4);
  int number[MINE], before = 0;
#pragma unroll
  for (int i = 0; i < MINE; i++) {
    const int c = 32 * i + lane;
    place[i] = 0, number[i] = c < CHANNELS ? of[c / 4] >> (6 - 2 * (c % 4)) & 3 : 4;
  }
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const u32 same = __ballot_sync(FULL, number[i] == k);
      if (number[i] == k) place[i] = before + __popc(same & ((1u << lane) - 1));
      before += __popc(same);
    }
}

// Parameters of a lane's channels: what codes near one are multiplied by, and what is added.
// unit: 0 without a code. level: the value at which a code near one is 0.
template <class R, bool SMALL, bool RANKED>
struct Levels {
  int slot[MINE];  // -1 without a code
  float unit[MINE], level[MINE];

  __device__ __forceinline__ void load(const unsigned char* numbers, const void* all_scales,
                                       const void* all_zeros, int row, int lane) {
    const ParameterRow<SMALL, false> scales(all_scales, row, R::CODED);
    const ParameterRow<SMALL, true> zeros(all_zeros, row, CHANNELS);
    int place[MINE];
    find_places<RANKED>(place, numbers, row, lane);
#pragma unroll
    for (int i = 0; i < MINE; i++) {
      const bool real = 32 * i + lane < CHANNELS, coded = real && place[i] < R::CODED;
      const float steps = (float)(1 << R::bits(place[i]));
      const float scale = coded ? scales.number(place[i]) : 0.f;
      slot[i] = coded ? R::slot(place[i]) : -1;
      unit[i] = scale * steps;
      level[i] = real ? zeros.number(place[i]) - unit[i] : 0.f;
      if (SMALL && coded) level[i] -= scale * (0.5f * (steps - 1.f));  // from the middle
    }
  }
};
