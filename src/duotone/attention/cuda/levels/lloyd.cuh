// Levels that minimise a channel's squared error (quant.ranges.lloyd_range). These are 8 rounds of
// nearest levels and least squares from two starts at once, in one read per round. The better end
// wins.
//
// Codes are counted in units of 2^-bits (`unit`). So a saturated multiply-add, an addition that
// rounds down and a minimum find them; of one bit, a comparison does.
#define ROUNDS 8

struct Moments {
  float count, low, high, mean, square;  // of centred elements: bounds, mean, mean square
};

struct Descent {
  float scale, zero;
  float factor, shift;             // of `code`; of one bit, shift is the threshold
  float codes, squares, products;  // sums of code, code^2, code * x, then the squared error

  template <bool ONE>
  __device__ __forceinline__ void prepare(float unit) {
    codes = squares = products = 0.f;
    if (ONE) {
      shift = scale > 0.f ? zero + 0.5f * scale : INFINITE;
    } else {
      const float steps = scale > 0.f ? 1.f / scale : 0.f;
      factor = steps * unit, shift = steps > 0.f ? (0.5f - zero * steps) * unit : 0.f;
    }
  }
  // In units of 2^-bits; of one bit, 0 or 1.
  template <bool ONE>
  __device__ __forceinline__ float code(float x, float unit) const {
    if (ONE) return x >= shift ? 1.f : 0.f;
    const float floor = 8388608.f * unit;
    return fminf(__fadd_rd(__saturatef(x * factor + shift), floor), floor + (1.f - unit)) - floor;
  }
  template <bool ONE>
  __device__ __forceinline__ void add(float x, float unit) {
    const float c = code<ONE>(x, unit);
    codes += c, products += c * x;
    if (!ONE) squares += c * c;
  }
  // Least squares of x on its codes (`_fit`); whether that moved the levels. width: 1 / unit.
  template <bool ONE>
  __device__ __forceinline__ bool fit(const Moments& m, float width) {
    const float mean = codes * width / m.count;
    const float spread = (ONE ? codes : squares * width * width) - m.count * mean * mean;
    const float covariance = products * width - m.count * mean * m.mean;
    const float step = spread > 0.25f ? covariance / spread : scale;
    const float start = m.mean - step * mean;
    const bool moved = step != scale || start != zero;
    scale = step, zero = start;
    return moved;
  }
};

// The starts' least squares until nothing moves; `codes` of each is its squared error then.
template <bool ONE>
__device__ __forceinline__ void descend(Descent* starts, const SubBlock& sub_block,
                                        const Moments& m, int bits) {
  const float width = ONE ? 1.f : (float)(1 << bits), unit = 1.f / width;
  Descent a = starts[0], b = starts[1];
#pragma unroll 1
  for (int round = 0; round < ROUNDS; round++) {
    a.prepare<ONE>(unit), b.prepare<ONE>(unit);
    sub_block.each([&](float x, int) { a.add<ONE>(x, unit), b.add<ONE>(x, unit); });
    float sums[6] = {a.codes, a.products, b.codes, b.products, a.squares, b.squares};
    sub_block.sum<ONE ? 4 : 6>(sums);
    a.codes = sums[0], a.products = sums[1], a.squares = sums[4];
    b.codes = sums[2], b.products = sums[3], b.squares = sums[5];
    const bool moved = a.fit<ONE>(m, width) | b.fit<ONE>(m, width);
    if (!__ballot_sync(FULL, moved)) break;
  }
  a.prepare<ONE>(unit), b.prepare<ONE>(unit);
  float errors[2] = {};
  sub_block.each([&](float x, int) {
    const float first = a.code<ONE>(x, unit) * width * a.scale + a.zero - x;
    const float second = b.code<ONE>(x, unit) * width * b.scale + b.zero - x;
    errors[0] += first * first, errors[1] += second * second;
  });
  sub_block.sum<2>(errors);
  starts[0] = a, starts[1] = b;
  starts[0].codes = errors[0], starts[1].codes = errors[1];
}

// The best step of a unit Gaussian (quant.ranges.GAUSSIAN_STEP).
__device__ __forceinline__ float gaussian_step(int bits) {
  return bits == 1 ? 1.5957691216f : bits == 2 ? 0.9956866859f : 0.3352006095f;
}

// Whole warps come here; bits 0: a sub-block that has nothing to find. zero: absolute.
__device__ __forceinline__ void lloyd(float& scale, float& zero, const SubBlock& sub_block,
                                      const Moments& m, int bits) {
  const float top = (float)((1 << bits) - 1), widest = bits ? (m.high - m.low) / top : 0.f;
  if (!__ballot_sync(FULL, bits > 0)) return;
  Descent starts[2] = {};
  starts[0].scale = widest, starts[0].zero = m.low;
  starts[1].scale = fminf(gaussian_step(bits) * sqrtf(m.square), widest);
  starts[1].zero = fminf(fmaxf(-starts[1].scale * top / 2, m.low), m.high);
  if (__ballot_sync(FULL, bits > 1))
    descend<false>(starts, sub_block, m, bits);
  else
    descend<true>(starts, sub_block, m, bits);
  const bool second = starts[1].codes < starts[0].codes;
  scale = second ? starts[1].scale : starts[0].scale;
  zero = sub_block.mean + (second ? starts[1].zero : starts[0].zero);
}
