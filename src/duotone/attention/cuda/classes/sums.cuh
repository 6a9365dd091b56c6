// softmax(q K^T) V of a unit: integer sums of p * code, p in 16 bits under a running maximum.
struct Sums {
  int acc[HT][Values::COLUMNS][4], total[HT][4];
  float top[HT];
  u32 p[HT][2][2], ones[4];

  __device__ __forceinline__ void clear(const Prologue& prologue) {
    asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(ones[0]), "=r"(ones[1]), "=r"(ones[2]), "=r"(ones[3])
                 : "r"(shared_address(prologue.ones)));
#pragma unroll
    for (int h = 0; h < HT; h++) {
#pragma unroll
      for (int m = 0; m < Values::COLUMNS; m++)
        acc[h][m][0] = acc[h][m][1] = acc[h][m][2] = acc[h][m][3] = 0;
      total[h][0] = total[h][1] = total[h][2] = total[h][3] = 0;
      p[h][0][0] = p[h][0][1] = p[h][1][0] = p[h][1][1] = 0;
      top[h] = -1e30f;
    }
  }
  __device__ __forceinline__ void add(const u32* v) {
#pragma unroll
    for (int h = 0; h < HT; h++) mma_v(total[h], ones, p[h][0]), mma_v(total[h], ones, p[h][1]);
    add_values<0, 0>(acc, v, p);
    add_values<1, 0>(acc, v, p);
  }
  __device__ __forceinline__ u32 exponentials(const float (*f)[8], const Query& q, u32 (*pi)[8],
                                              int h) const {
    const float shift = q.offset[h] + (P_TOP - top[h]);
    u32 over = 0;
#pragma unroll
    for (int x = 0; x < 8; x++) {
      pi[h][x] = __float_as_uint(exp2_fast(fmaf(f[h][x], q.scale[h], shift)) + P_BIAS);
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
      const float score = fmaf(a, q.scale[h], q.offset[h]);
      const float raised = score > top[h] - 1.f ? floorf(score) + LIFT : top[h];
      const int by = (int)fminf(raised - top[h], 31.f);
      top[h] = raised;
#pragma unroll
      for (int m = 0; m < Values::COLUMNS; m++) shift_digits(acc[h][m], by);
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
  // To shared memory as floats, by channel: rows [4 HT][D + 8]; maximum and weight of each head.
  __device__ __forceinline__ void store(const Unit& u, float* rows, float (*ml)[2],
                                        const Prologue& prologue) const {
    for (int i = u.lane; i < HEADS * (D + 8); i += 32) rows[i] = 0.f;  // channels without codes
    __syncwarp();
    store_column<0>(u, rows, prologue.channel);
    if (u.g == 0)
#pragma unroll
      for (int h = 0; h < HT; h++)
        ml[h * 4 + u.t][0] = top[h],
                   ml[h * 4 + u.t][1] = (float)total[h][0] * 256.f + (float)total[h][1];
  }
  template <int COLUMN>
  __device__ __forceinline__ void store_column(const Unit& u, float* rows,
                                               const short* channel) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int c = channel[16 * COLUMN + 8 * half + u.g];
      const float weight = 1.f / (float)(1 << value_bit(COLUMN, half));
#pragma unroll
      for (int h = 0; h < HT; h++) {
        const int* sum = acc[h][COLUMN] + 2 * half;
        if (c >= 0)
          rows[(h * 4 + u.t) * (D + 8) + c] = ((float)sum[0] * 256.f + (float)sum[1]) * weight;
      }
    }
    if constexpr (COLUMN + 1 < Values::COLUMNS) store_column<COLUMN + 1>(u, rows, channel);
  }
};
