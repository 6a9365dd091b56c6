  // Part of `Packer`: codes, scales, zero-points and signs of a step.
  // Four registers of codes, low halves and high halves, into their word.
  static __device__ __forceinline__ void add_codes(const Job& job, int step, int f, u32 four) {
    const int bit = (row_tile(step, f) * CHUNKS + chunk(step, f)) * 4 * BITS;
    Words<WORDS>(job.words, job.lane).add(bit / 16, four << bit % 16);
  }
  static __device__ __forceinline__ u32 join(u16 low, u16 high) {
    return (u32)low | (u32)high << 16;
  }

  static __device__ __forceinline__ bool write(const Pair (*x)[4], const Bounds* b, const Job& job,
                                               int step) {
    if constexpr (MAPPING == ASYMMETRIC)
      return write_plain(x, b, job, step);
    else
      return write_signed(x, b, job, step);
  }

  static __device__ __forceinline__ bool write_plain(const Pair (*x)[4], const Bounds* b,
                                                     const Job& job, int step) {
    Levels l[GROUPS];
    bool fits = true;
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
      l[n].template asymmetric<BITS>(b[n], job.shrink);
      fits &= l[n].template fits<BITS>();
    }
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      u32 four = 0;
#pragma unroll
      for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          four += l[group_of(i, half)].template code<BITS>(number(x[f][i], half))
                  << (16 * half + BITS * i);
      add_codes(job, step, f, four);
    }
    if constexpr (ALONG_K) {
      if (job.t == 0)
        ((uint2*)job.params)[step * 8 + job.g] =
            make_uint2(join(l[0].scale_bits, l[1].scale_bits), join(l[0].zero_bits, l[1].zero_bits));
    } else {
      if (job.g == 0)
        ((uint4*)job.params)[step * 4 + job.t] = make_uint4(
            join(l[0].scale_bits, l[1].scale_bits), join(l[2].scale_bits, l[3].scale_bits),
            join(l[0].zero_bits, l[1].zero_bits), join(l[2].zero_bits, l[3].zero_bits));
    }
    return fits;
  }

  // Rows g and g + 8 in turn: both mappings of a hybrid, the better one's codes, and its word.
  static __device__ __forceinline__ bool write_signed(const Pair (*x)[4], const Bounds* b,
                                                      const Job& job, int step) {
    u32 four[FRAGMENTS] = {}, word[2];
    u16 scale[2];
    bool fits = true;
#pragma unroll
    for (int n = 0; n < 2; n++) {
      Levels plain, sized;
      sized.template symmetric<BITS>(b[n], job.shrink);
      bool signs = true;
      if constexpr (MAPPING == HYBRID) {
        plain.template asymmetric<BITS>(b[n], job.shrink);
        signs = error_of<true>(x, n, sized) < error_of<false>(x, n, plain);
        if (!signs) sized = plain;
      }
      fits &= sized.template fits<BITS>();
      u32 negative = 0;
#pragma unroll
      for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
        for (int i = n; i < 4; i += 2)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const float y = number(x[f][i], half);
            four[f] += sized.template code<BITS>(signs ? fabsf(y) : y) << (16 * half + BITS * i);
            negative += (u32)(y < 0.f) << (16 * half + 15 - 8 * f - 4 * (i / 2));
          }
      negative >>= job.t;
      negative |= __shfl_xor_sync(FULL, negative, 1);
      negative |= __shfl_xor_sync(FULL, negative, 2);
      word[n] = signs ? negative : sized.zero_bits;
      // A symmetric tensor's groups have the flag even where head_dim is filled up.
      const bool real = MAPPING == SYMMETRIC || !VALUE || channel(job, step, n) < CHANNELS;
      scale[n] = signs && real ? sized.scale_bits | 0x8000 : sized.scale_bits;
    }
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) add_codes(job, step, f, four[f]);
    if (job.t == 0) {
      ((u32*)job.params)[step * 8 + job.g] = join(scale[0], scale[1]);
      ((uint2*)(job.params + STEPS * 32))[step * 8 + job.g] = make_uint2(word[0], word[1]);
    }
    return fits;
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
