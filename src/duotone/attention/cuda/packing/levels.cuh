// Levels of a group and the codes of its elements. Roundings are in the order that quant/ranges.py
// and quant/affine.py have on a GPU, so that codes are equal bit for bit.
//
// torch multiplies by the rounded reciprocal where it divides by a number that the host knows.
template <int BITS>
struct Top {
  static constexpr float VALUE = (1 << BITS) - 1, INVERSE = 1.f / VALUE;
};

// Bounds of a group. smallest: least magnitude.
struct Bounds {
  float low, high, smallest;
};

// d / scale, rounded as IEEE divides; 0 where scale, and so the inverse, is 0. Since scale has 11
// bits, the remainder of a quotient that is off by a few units is exact. The result is never a tie.
// One correction by an approximate inverse then rounds it as it must be.
__device__ __forceinline__ float quotient(float d, float scale, float inverse) {
  const float q = __fmul_rn(d, inverse);
  return __fmaf_rn(__fmaf_rn(-q, scale, d), inverse, q);
}

// x = code * scale + zero.
struct Levels {
  float scale, zero, inverse;
  u16 scale_bits, zero_bits;

  __device__ __forceinline__ void read(u16 step, u16 start) {
    scale_bits = step, zero_bits = start;
    scale = half_to_float(step), zero = half_to_float(start);
    inverse = scale > 0.f ? inverse_fast(scale) : 0.f;
  }
  __device__ __forceinline__ void set(float step, float start) {
    read(float_to_half(step), float_to_half(start));
  }
  template <int BITS>
  __device__ __forceinline__ void asymmetric(Bounds b, float shrink) {
    either<BITS>(b, shrink, false);
  }
  template <int BITS>
  __device__ __forceinline__ void symmetric(Bounds b, float shrink) {
    either<BITS>(b, shrink, true);
  }
  template <int BITS>
  __device__ __forceinline__ void either(Bounds b, float shrink, bool signs) {
    const float top = fabsf(greatest(-b.low, b.high));
    const bool wide = signs ? top > b.smallest : b.high > b.low;
    const float factor = wide || signs ? shrink : 1.f;
    const float low = signs ? 0.f : __fmul_rn(b.low, factor);
    const float width = __fsub_rn(__fmul_rn(signs ? top : b.high, factor), low);
    const float step = __fmul_rn(width, Top<BITS>::INVERSE);
    set(signs && !wide ? top : step, low);
  }
  // Levels of codes: end points moved inwards by eta of the width; rest: 1 - 2 eta.
  template <int BITS>
  __device__ __forceinline__ void move_in(float eta, float rest) {
    set(__fmul_rn(rest, scale),
        __fadd_rn(zero, __fmul_rn(__fmul_rn(eta, scale), Top<BITS>::VALUE)));
  }
  // True for an element within eta / 2 of the width of an end point.
  template <int BITS>
  __device__ __forceinline__ bool at_end(float x, float eta) const {
    const float half = __fmul_rn(scale, Top<BITS>::VALUE / 2);
    const float from_middle = fabsf(__fsub_rn(__fsub_rn(x, zero), half));
    return fabsf(__fsub_rn(from_middle, half)) <= __fmul_rn(eta, half);
  }
  template <int BITS>
  __device__ __forceinline__ u32 code(float x) const {
    const float steps = __fadd_rn(quotient(__fsub_rn(x, zero), scale, inverse), 0.5f);
    return min(__float2uint_rd(steps), (1u << BITS) - 1);
  }
  // As the decode kernel wants it (groups/layout.py: scales_fit), and finite. wide: in a wide tile.
  template <int BITS, int ALONG_K>
  __device__ __forceinline__ bool fits(bool wide) const {
    const float limit = ALONG_K ? 1 << (15 - BITS) : wide ? INFINITE : 64.f;
    return scale < limit && fabsf(zero) < INFINITE;
  }
};
