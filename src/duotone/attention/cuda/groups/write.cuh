// Part of `Packer`: codes, scales, zero-points and signs of a step.
// Words that a run's codes are in, bits from one q to the next, and chunks that a step sees.
static constexpr int PARTS = BITS == 4 ? 2 : 1, SPACING = BITS == 1 ? 2 : BITS;
static constexpr int CHUNKS_OF_RUN = ALONG_K ? 2 : 1;

// The word of register i, and the bit in it of an element, of the first chunk that a step sees.
static __device__ __forceinline__ constexpr int part(int i) {
  return PARTS == 2 ? i % 2 : 0;
}
static __device__ __forceinline__ constexpr int bit_of(int f, int i, int half) {
  const int q = f % CHUNKS_OF_RUN * 2 + i / 2;
  return 16 * half + SPACING * q + (PARTS == 1 ? 8 * (i % 2) : 0);
}
// Codes of the run that fragment f begins or has its half of.
static __device__ __forceinline__ void add_codes(const Job& job, int step, int f,
                                                 const u32* codes) {
  const int c = chunk(step, f), run = row_tile(step, f) * (CHUNKS / 2) + c / 2;
  const int up = c % 2 * 2 * SPACING + (BITS == 1 ? run % 2 : 0);
#pragma unroll
  for (int n = 0; n < PARTS; n++)
    Words<WORDS>(job.words, job.lane).add(run * BITS / 2 + n, codes[n] << up);
}
static __device__ __forceinline__ u32 join(u16 low, u16 high) {
  return (u32)low | (u32)high << 16;
}

// Factor of a code of an even or odd q where it stands; of a wide tile -scale.
static __device__ __forceinline__ u16 step_of(const Levels& l, int odd, bool wide) {
  const float by = (float)(1 << (6 + BITS + (BITS < 4 && !odd ? 2 : 0)));
  return float_to_half(l.scale * (wide ? -1.f : by));
}

// before: of the step before. wide: the tile is, where groups run along rows.
static __device__ __forceinline__ bool write(const Pair (*x)[4], const Bounds* b, const Job& job,
                                             int step, RowPair& before, bool wide) {
  if constexpr (MAPPING == ASYMMETRIC)
    return write_plain(x, b, job, step, before, wide);
  else
    return write_signed(x, b, job, step, before);
}

static __device__ __forceinline__ bool write_plain(const Pair (*x)[4], const Bounds* b,
                                                   const Job& job, int step, RowPair& before,
                                                   bool wide) {
  Levels l[GROUPS];
  bool fits = true;
#pragma unroll
  for (int n = 0; n < GROUPS; n++) l[n].template asymmetric<BITS>(b[n], job.shrink);
#pragma unroll
  for (int first = 0; first < FRAGMENTS; first += CHUNKS_OF_RUN) {
    u32 codes[PARTS] = {};
#pragma unroll
    for (int f = first; f < first + CHUNKS_OF_RUN; f++)
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          codes[part(i)] += l[group_of(i, half)].template code<BITS>(number(x[f][i], half))
                            << bit_of(f, i, half);
    add_codes(job, step, first, codes);
  }
  if (job.eta != 0.f) move_in(l, x, job);
#pragma unroll
  for (int n = 0; n < GROUPS; n++) fits &= l[n].template fits<BITS, ALONG_K>(wide);
  if constexpr (ALONG_K) {
    store_pair(job, step, before,
               {join(l[0].scale_bits, l[1].scale_bits), join(l[0].zero_bits, l[1].zero_bits), 0});
  } else {
    if (job.g == 0)
      ((uint4*)job.params)[step * 4 + job.t] = make_uint4(
          join(step_of(l[0], 0, wide), step_of(l[1], 0, wide)),
          join(step_of(l[2], 1, wide), step_of(l[3], 1, wide)),
          join(l[0].zero_bits, l[1].zero_bits), join(l[2].zero_bits, l[3].zero_bits));
  }
  return fits;
}

// End points moved in, but along channels where most elements lie at them (quant/levels.py).
static __device__ __forceinline__ void move_in(Levels* l, const Pair (*x)[4], const Job& job) {
  u32 at_ends[GROUPS / 2] = {};  // of two groups each
  if constexpr (VALUE != ALONG_K) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int n = group_of(i, half);
          const bool there = l[n].template at_end<BITS>(number(x[f][i], half), job.eta);
          at_ends[n / 2] += (u32)there << 16 * (n % 2);
        }
#pragma unroll
    for (int mask = ALONG_K ? 1 : 4; mask < (ALONG_K ? 4 : 32); mask *= 2)
#pragma unroll
      for (int n = 0; n < GROUPS / 2; n++)
        at_ends[n] += __shfl_xor_sync(FULL, at_ends[n], mask);
  }
#pragma unroll
  for (int n = 0; n < GROUPS; n++)
    if (2 * (at_ends[n / 2] >> 16 * (n % 2) & 0xFFFF) <= GROUP)
      l[n].template move_in<BITS>(job.eta, job.rest);
}

// Levels of a row under one mapping, and what codes take of them.
struct Mapping {
  Levels levels;
  Coder<BITS> coder;

  __device__ __forceinline__ void symmetric(const Bounds& b, float shrink) {
    levels.template symmetric<BITS>(b, shrink);
    coder.set(levels);
  }
  // Part of the pair that lane `lane` has.
  __device__ __forceinline__ Mapping of_lane(int lane, bool signs) const {
    Mapping y;
    y.levels.scale = __shfl_sync(FULL, levels.scale, lane);
    y.levels.zero = signs ? 0.f : __shfl_sync(FULL, levels.zero, lane);
#pragma unroll
    for (int n = 0; n < Coder<BITS>::NUMBERS; n++)
      y.coder.x[n] = __shfl_sync(FULL, coder.x[n], lane);
    return y;
  }
};
// The mapping that this lane finds, of a hybrid's two rows and two mappings: of row t % 2, with signs
// where t is below 2. Four lanes hold the same rows.
static __device__ __forceinline__ Mapping own_mapping(const Bounds* b, const Job& job) {
  const bool second = job.t % 2, signs = job.t < 2;
  const Bounds mine = {second ? b[1].low : b[0].low, second ? b[1].high : b[0].high,
                       second ? b[1].smallest : b[0].smallest};
  Mapping y;
  y.levels.template either<BITS>(mine, job.shrink, signs);
  y.coder.set(y.levels);
  return y;
}

// Codes of a row's elements under one mapping. digits: of both halves, the sum of code * 2^(DIGIT
// q), with the element's sign where there are signs.
static constexpr int DIGIT = BITS < 4 ? 4 : 5;
struct Trial {
  float error = 0.f, digits[2] = {0.f, 0.f};
};
template <bool SIGNS>
static __device__ __forceinline__ Trial try_row(const Pair (*x)[4], int n, const Mapping& m) {
  const Levels& l = m.levels;
  Trial y;
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int i = n; i < 4; i += 2)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float v = number(x[f][i], half), d = SIGNS ? fabsf(v) : __fsub_rn(v, l.zero);
        const float code = m.coder.code(d);
        // code * scale has no more than 15 bits: one rounding less changes nothing. Of 16 bits, d
        // is v - zero but for what is far below the others' roundings.
        const float off = SIGNS || INPUT != 2 ? __fmaf_rn(code, l.scale, -d)
                                              : __fsub_rn(__fmaf_rn(code, l.scale, l.zero), v);
        y.error = __fadd_rn(y.error, fabsf(off));
        const float weight = 1 << DIGIT * (2 * f + i / 2);
        y.digits[half] = fmaf(code, SIGNS ? copysignf(weight, v) : weight, y.digits[half]);
      }
  return y;
}
// A row's error. torch sums in an order of its own. A hybrid whose mappings differ by less than the
// rounding of such a sum may choose the other one.
static __device__ __forceinline__ float over_row(const Trial& y) {
  const float sum = __fadd_rn(y.error, __shfl_xor_sync(FULL, y.error, 1));
  return __fadd_rn(sum, __shfl_xor_sync(FULL, sum, 2));
}

// Rows g and g + 8 in turn: both mappings of a hybrid, the better one's numbers of BITS + 1 bits.
static __device__ __forceinline__ bool write_signed(const Pair (*x)[4], const Bounds* b,
                                                    const Job& job, int step, RowPair& before) {
  u32 codes[PARTS] = {}, low = 0;
  u16 scale[2], zero[2];
  bool fits = true;
  Mapping own;
  if constexpr (MAPPING == HYBRID) own = own_mapping(b, job);
#pragma unroll
  for (int n = 0; n < 2; n++) {
    Mapping m;
    if constexpr (MAPPING == HYBRID)
      m = own.of_lane(4 * job.g + n, true);
    else
      m.symmetric(b[n], job.shrink);
    Trial best = try_row<true>(x, n, m);
    // Channels that fill up head_dim have no flag.
    bool signs = !VALUE || channel(job, step, n) < CHANNELS;
    if constexpr (MAPPING == HYBRID) {
      const Mapping plain = own.of_lane(4 * job.g + 2 + n, false);
      const Trial other = try_row<false>(x, n, plain);
      signs = over_row(best) < over_row(other);
      if (!signs) m = plain, best = other;
    }
    fits &= m.levels.template fits<BITS, ALONG_K>(false);
    add_numbers(codes, low, best.digits, signs, n);
    scale[n] = float_to_half(signs ? -2.f * m.levels.scale : m.levels.scale);
    zero[n] = float_to_half(m.levels.zero);
  }
  add_codes(job, step, 0, codes);
  low <<= job.t % 2;
  low |= __shfl_xor_sync(FULL, low, 1);
  store_pair(job, step, before, {join(scale[0], scale[1]), join(zero[0], zero[1]), low});
  return fits;
}
// A number ends with the bit next to its code: 2 code, or 2^BITS less a code with its sign. Those
// of row n, as digits of an integer, to their bits in words of codes and of lowest bits (of even
// t).
static __device__ __forceinline__ void add_numbers(u32* codes, u32& low, const float* digits,
                                                   bool signs, int n) {
  constexpr u32 ONES = BITS < 4 ? 0x1111 : 0x8421;
  u32 numbers[2];
#pragma unroll
  for (int half = 0; half < 2; half++)
    numbers[half] = __float_as_uint(signs ? TWO_TO_23 + (ONES << BITS) - digits[half]
                                          : fmaf(2.f, digits[half], TWO_TO_23));
  if constexpr (BITS < 4) {
    const u32 both = __byte_perm(numbers[0], numbers[1], 0x5410);
    const u32 lowest = squeezed(both & 0x11111111);
    codes[0] |= squeezed(both >> 1 & 0x33333333) << 8 * n;
    low |= ((lowest | lowest >> 8) & 0xFFFF) << 16 * n;
  } else {
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const u32 u = numbers[half] >> DIGIT * q;
        codes[n] |= (u >> 1 & 15) << (16 * half + 4 * q);
        low |= (u & 1) << (16 * n + 8 * half + 4 * (q % 2) + q / 2 * 2);
      }
  }
}
// Two bits of every four, four times in each half, side by side in the half's lower byte.
static __device__ __forceinline__ u32 squeezed(u32 x) {
  x = (x | x >> 2) & 0x0F0F0F0F;
  return (x | x >> 4) & 0x00FF00FF;
}

// Steps n and n + 1 along k, when the second is known.
static __device__ __forceinline__ void store_pair(const Job& job, int step, RowPair& before,
                                                  RowPair now) {
  char* pair = job.params + step / 2 * (MAPPING ? 192 : 128);
  if (step % 2 && job.t == 0)
    ((uint4*)pair)[job.g] = make_uint4(before.scale, now.scale, before.word(), now.word());
  if (MAPPING && step % 2 && job.t == 2)
    ((uint2*)(pair + 128))[job.g] = make_uint2(before.low, now.low);
  before = now;
}
