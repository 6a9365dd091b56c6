// Part of `Packer`: codes, scales, zero-points and signs of a step.
// Words that a run's codes are in, how far apart its q are, and chunks of it that a step sees.
static constexpr int PARTS = BITS == 4 ? 2 : 1, APART = BITS == 1 ? 2 : BITS;
static constexpr int CHUNKS_OF_RUN = ALONG_K ? 2 : 1;

// The word of register i, and the bit in it of an element, of the first chunk that a step sees.
static __device__ __forceinline__ constexpr int part(int i) {
  return PARTS == 2 ? i % 2 : 0;
}
static __device__ __forceinline__ constexpr int place(int f, int i, int half) {
  const int q = f % CHUNKS_OF_RUN * 2 + i / 2;
  return 16 * half + APART * q + (PARTS == 1 ? 8 * (i % 2) : 0);
}
// Codes of the run that fragment f begins or has its half of.
static __device__ __forceinline__ void add_codes(const Job& job, int step, int f,
                                                 const u32* codes) {
  const int c = chunk(step, f), run = row_tile(step, f) * (CHUNKS / 2) + c / 2;
  const int up = c % 2 * 2 * APART + (BITS == 1 ? run % 2 : 0);
#pragma unroll
  for (int n = 0; n < PARTS; n++)
    Words<WORDS>(job.words, job.lane).add(run * BITS / 2 + n, codes[n] << up);
}
static __device__ __forceinline__ u32 join(u16 low, u16 high) {
  return (u32)low | (u32)high << 16;
}

// What a code of an even or odd q is multiplied by where it stands.
static __device__ __forceinline__ u16 step_of(const Levels& l, int odd) {
  return float_to_half(l.scale * (float)(1 << (6 + BITS + (BITS < 4 && !odd ? 2 : 0))));
}

// before: of the step before.
static __device__ __forceinline__ bool write(const Pair (*x)[4], const Bounds* b, const Job& job,
                                             int step, RowPair& before) {
  if constexpr (MAPPING == ASYMMETRIC)
    return write_plain(x, b, job, step, before);
  else
    return write_signed(x, b, job, step, before);
}

static __device__ __forceinline__ bool write_plain(const Pair (*x)[4], const Bounds* b,
                                                   const Job& job, int step, RowPair& before) {
  Levels l[GROUPS];
  bool fits = true;
#pragma unroll
  for (int n = 0; n < GROUPS; n++) {
    l[n].template asymmetric<BITS>(b[n], job.shrink);
    fits &= l[n].template fits<BITS, ALONG_K>();
  }
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
                            << place(f, i, half);
    add_codes(job, step, first, codes);
  }
  if constexpr (ALONG_K) {
    store_pair(job, step, before,
               {join(l[0].scale_bits, l[1].scale_bits), join(l[0].zero_bits, l[1].zero_bits), 0});
  } else {
    if (job.g == 0)
      ((uint4*)job.params)[step * 4 + job.t] = make_uint4(
          join(step_of(l[0], 0), step_of(l[1], 0)), join(step_of(l[2], 1), step_of(l[3], 1)),
          join(l[0].zero_bits, l[1].zero_bits), join(l[2].zero_bits, l[3].zero_bits));
  }
  return fits;
}

// Rows g and g + 8 in turn: both mappings of a hybrid, the better one's numbers of BITS + 1 bits.
static __device__ __forceinline__ bool write_signed(const Pair (*x)[4], const Bounds* b,
                                                    const Job& job, int step, RowPair& before) {
  u32 codes[PARTS] = {}, low = 0;
  u16 scale[2], zero[2];
  bool fits = true;
#pragma unroll
  for (int n = 0; n < 2; n++) {
    Levels plain, sized;
    sized.template symmetric<BITS>(b[n], job.shrink);
    // Channels that fill up head_dim have no flag.
    bool signs = !VALUE || channel(job, step, n) < CHANNELS;
    if constexpr (MAPPING == HYBRID) {
      plain.template asymmetric<BITS>(b[n], job.shrink);
      signs = error_of<true>(x, n, sized) < error_of<false>(x, n, plain);
      if (!signs) sized = plain;
    }
    fits &= sized.template fits<BITS, ALONG_K>();
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
      for (int i = n; i < 4; i += 2)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const u32 u = number_of(sized, signs, number(x[f][i], half));
          codes[part(i)] += u / 2 << place(f, i, half);
          low += u % 2 << low_place(f, i, half);
        }
    scale[n] = signs ? float_to_half(-2.f * sized.scale) : sized.scale_bits;
    zero[n] = sized.zero_bits;
  }
  add_codes(job, step, 0, codes);
  low <<= job.t % 2;
  low |= __shfl_xor_sync(FULL, low, 1);
  store_pair(job, step, before, {join(scale[0], scale[1]), join(zero[0], zero[1]), low});
  return fits;
}
// An element as a number that ends with the bit beside its code.
static __device__ __forceinline__ u32 number_of(const Levels& l, bool signs, float y) {
  const u32 code = l.template code<BITS>(signs ? fabsf(y) : y);
  return !signs ? 2 * code : y < 0.f ? (1u << BITS) + code : (1u << BITS) - code;
}
// The bit of a number's lowest bit, of even t.
static __device__ __forceinline__ constexpr int low_place(int f, int i, int half) {
  return 16 * (i % 2) + 8 * half + (BITS == 4 ? 4 * (i / 2) + 2 * f : 4 * f + 2 * (i / 2));
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

// Sum of the absolute errors of row n. torch sums in an order of its own: a hybrid whose mappings
// differ by less than the rounding of such a sum may choose the other one.
template <bool SIGNS>
static __device__ __forceinline__ float error_of(const Pair (*x)[4], int n, const Levels& l) {
  float sum = 0.f;
#pragma unroll
  for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
    for (int i = n; i < 4; i += 2)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const float y = number(x[f][i], half), size = SIGNS ? fabsf(y) : y;
        const float steps = floorf(l.steps(size));
        const float code = fminf(fmaxf(steps, 0.f), Top<BITS>::VALUE);
        const float decoded = __fadd_rn(__fmul_rn(code, l.scale), l.zero);
        sum = __fadd_rn(sum, fabsf(__fsub_rn(decoded, size)));
      }
  sum = __fadd_rn(sum, __shfl_xor_sync(FULL, sum, 1));
  return __fadd_rn(sum, __shfl_xor_sync(FULL, sum, 2));
}
