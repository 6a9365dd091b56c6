// Codes as floats: what `Levels::code` gives, bit for bit, by instructions that run at the rate of
// additions and without a conversion.
//
// `Levels::code` is floor(t + 1/2) of the rounded quotient t = d / scale, which rises with d. So a
// code is j or more where d lies above a number. That number follows from how t and the sum are
// rounded:
//
//     j = 1: (1/2 - 3 / 2^26) scale   j = 2: (3/2 - 1 / 2^24) scale   j = 3: (5/2 - 1 / 2^23) scale
//
// None of them is a float (scale has 11 bits, the factors 25): the float below it decides as well.
// 2^60 (d - that float) is then 1 or more, or not above 0, and saturates to one of both.
#define TWO_TO_23 8388608.f
#define TWO_TO_60 1152921504606846976.f

// -2^60 times the edge of code j. Where scale is 0 it is not a number, and nothing is above it.
__device__ __forceinline__ float edge_of(const Levels& l, int j) {
  const float below = j == 1 ? 3.f / (1 << 26) : j == 2 ? 1.f / (1 << 24) : 1.f / (1 << 23);
  const float lifted = l.scale > 0.f ? l.scale * TWO_TO_60 : INFINITE;
  return __fmaf_ru(lifted, below, lifted * (0.5f - j));
}
__device__ __forceinline__ float above(float d, float edge) {
  return __saturatef(__fmaf_rn(d, TWO_TO_60, edge));
}

// x: what `code` has to know of a scale. code(d): of zero + d. lifted(d): 2^23 more.
//
// By the quotient t: (t + 1/2) / 2^BITS saturates to 0, and 2^BITS times it is rounded down where
// 2^23 is added.
template <int BITS>
struct Coder {
  static constexpr int NUMBERS = 2;
  float x[NUMBERS];

  __device__ __forceinline__ void set(const Levels& l) { x[0] = l.scale, x[1] = l.inverse; }
  __device__ __forceinline__ float lifted(float d) const {
    constexpr float UNIT = 1.f / (1 << BITS);
    const float part = __saturatef(__fmaf_rn(quotient(d, x[0], x[1]), UNIT, 0.5f * UNIT));
    return __fmaf_rd(fminf(part, Top<BITS>::VALUE * UNIT), 1 << BITS, TWO_TO_23);
  }
  __device__ __forceinline__ float code(float d) const { return lifted(d) - TWO_TO_23; }
};
template <>
struct Coder<1> {
  static constexpr int NUMBERS = 1;
  float x[NUMBERS];

  __device__ __forceinline__ void set(const Levels& l) { x[0] = edge_of(l, 1); }
  __device__ __forceinline__ float code(float d) const { return above(d, x[0]); }
  __device__ __forceinline__ float lifted(float d) const { return code(d) + TWO_TO_23; }
};
// The second edge decides on the upper bit, then the first or the third one on the lower bit.
template <>
struct Coder<2> {
  static constexpr int NUMBERS = 3;
  float x[NUMBERS];

  __device__ __forceinline__ void set(const Levels& l) {
    x[0] = edge_of(l, 1), x[1] = edge_of(l, 2);
    x[2] = __fadd_rd(edge_of(l, 3), -x[0]);
  }
  __device__ __forceinline__ float code(float d) const {
    const float upper = above(d, x[1]);
    // Rounded up what was rounded down, by less than a unit: the third edge.
    return __fmaf_rn(2.f, upper, above(d, __fmaf_ru(upper, x[2], x[0])));
  }
  __device__ __forceinline__ float lifted(float d) const { return code(d) + TWO_TO_23; }
};
