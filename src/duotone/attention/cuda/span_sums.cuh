// The softmax and the sums over V of one warp.
// softmax(q K^T) V of a unit: integer sums of p * code, p in 16 bits under a running maximum.
struct Sums {
  int acc[HT][MT][4], total[HT][4];
  float top[HT], shift[HT];
  u32 p[HT][2][2], ones[4];

  __device__ __forceinline__ void clear(const int* four_ones) {
    asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(ones[0]), "=r"(ones[1]), "=r"(ones[2]), "=r"(ones[3])
                 : "r"(shared_address(four_ones)));
#pragma unroll
    for (int h = 0; h < HT; h++) {
#pragma unroll
      for (int m = 0; m < MT; m++) acc[h][m][0] = acc[h][m][1] = acc[h][m][2] = acc[h][m][3] = 0;
      total[h][0] = total[h][1] = total[h][2] = total[h][3] = 0;
      p[h][0][0] = p[h][0][1] = p[h][1][0] = p[h][1][1] = 0;
      top[h] = -1e30f, shift[h] = 1e30f;
    }
  }
#ifdef KEPT_SCORES
  // Maxima that are known beforehand, in q's units: no weight will need more than 16 bits. `shift`
  // is rounded by half a unit of q's at most, since its parts are 2^23 of them: a maximum one unit
  // higher leaves room for that, and is then taken from what `shift` became.
  __device__ __forceinline__ void fix(const Query& q, const float* highest) {
#pragma unroll
    for (int h = 0; h < HT; h++) {
      if (!(highest[h] > MINUS_INFINITY)) continue;  // no keys
      const float unbiased = -P_BIAS * q.scale[h], whole = q.offset[h] + P_TOP;
      shift[h] = unbiased + (whole - fmaf(highest[h] + 1.f, q.scale[h], q.offset[h]));
      top[h] = whole - (shift[h] - unbiased);
    }
  }
#endif
  __device__ __forceinline__ void add(const u32* v) {
#pragma unroll
    for (int h = 0; h < HT; h++) mma_v(total[h], ones, p[h][0]), mma_v(total[h], ones, p[h][1]);
    VDot<0, 0>::run(acc, v, p);
    VDot<1, 0>::run(acc, v, p);
  }
  __device__ __forceinline__ u32 exponentials(const float (*f)[8], const Query& q, u32 (*pi)[8],
                                              int h) const {
    u32 over = 0;
#pragma unroll
    for (int x = 0; x < 8; x++) {
      pi[h][x] = __float_as_uint(exp2_fast(fmaf(f[h][x], q.scale[h], shift[h])) + P_BIAS);
      over |= pi[h][x];
    }
    return over;
  }
  // Some p needs more than 16 bits: raise the maxima and shift what was summed so far.
  __device__ __forceinline__ void raise(const float (*f)[8], const Query& q, u32 (*pi)[8]) {
#pragma unroll
    for (int h = 0; h < HT; h++) {
      float a = f[h][0];
#pragma unroll
      for (int x = 1; x < 8; x++) a = fmaxf(a, f[h][x]);
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) a = fmaxf(a, __shfl_xor_sync(FULL, a, o));
      const float score = fmaf(a - BIAS, q.scale[h], q.offset[h]);
      const float raised = score > top[h] - 1.f ? floorf(score) + LIFT : top[h];
      const int by = (int)fminf(raised - top[h], 31.f);
      top[h] = raised;
      shift[h] = fmaf(-BIAS, q.scale[h], q.offset[h] + P_TOP - raised);
#pragma unroll
      for (int m = 0; m < MT; m++) shift_digits(acc[h][m], by);
      shift_digits(total[h], by);
      exponentials(f, q, pi, h);
    }
  }
  __device__ __forceinline__ void to_operand(const u32 (*pi)[8]) {
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int u = 0; u < 2; u++) {
        p[h][u][0] = transpose8x8(__byte_perm(pi[h][4 * u], pi[h][4 * u + 2], 0x4051));
        p[h][u][1] = transpose8x8(__byte_perm(pi[h][4 * u + 1], pi[h][4 * u + 3], 0x4051));
      }
  }
  // Columns that came from whole bytes: take the other codes of the byte off.
  __device__ __forceinline__ void separate() {
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int m = VPB - 1; m < MT && V_RAW; m += VPB)
#pragma unroll
        for (int x = 0; x < 4; x++) {
          int rest = acc[h][m][x];
          if (V_SIGNED) {  // unsigned minus signed bytes: 256 times the top bit, which stands for
                           // 128
            const int top_bit = (int)((u32)rest - (u32)acc[h][m - 1][x]) >> 1;
            acc[h][m][x] = top_bit;
            rest -= top_bit;
          }
#pragma unroll
          for (int other = m - VPB + 1; other < m - V_SIGNED; other++) rest -= acc[h][other][x];
          acc[h][m - V_SIGNED][x] = rest;
        }
  }
  // To shared memory as floats: rows [4 HT][D + 8], and maximum and weight of each head.
  __device__ __forceinline__ void store(const Unit& u, float* rows, float (*ml)[2]) const {
#pragma unroll
    for (int h = 0; h < HT; h++) {
#pragma unroll
      for (int m = 0; m < MT; m++) {
        float* row = rows + (h * 4 + u.t) * (D + 8) + 16 * m + u.g;
        row[0] = ((float)acc[h][m][0] * 256.f + (float)acc[h][m][1]) * channel_weight(0, m);
        row[8] = ((float)acc[h][m][2] * 256.f + (float)acc[h][m][3]) * channel_weight(1, m);
      }
      if (u.g == 0)
        ml[h * 4 + u.t][0] = top[h],
                   ml[h * 4 + u.t][1] = (float)total[h][0] * 256.f + (float)total[h][1];
    }
  }
};
