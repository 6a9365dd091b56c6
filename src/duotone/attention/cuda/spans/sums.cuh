// The softmax and the sums over V of one warp.
// softmax(q K^T) V of a unit: integer sums of p * code, p in 16 bits under a running maximum.
struct Sums {
  int acc[HT][MT][4];
  u32 total[HT];  // of p's digits that this lane has: of column g, the high ones in even columns
  float shift[HT];
  // In shared memory, since raising the maxima is rare: maximum and offset of q head 4 h + t.
  float (*heads)[2];
  u32 p[HT][2][2];

  // ml: maximum and weight of each head in the end.
  __device__ __forceinline__ void clear(const Query& q, float (*ml)[2]) {
    heads = ml + (threadIdx.x & 3);
#pragma unroll
    for (int h = 0; h < HT; h++) {
#pragma unroll
      for (int m = 0; m < MT; m++) acc[h][m][0] = acc[h][m][1] = acc[h][m][2] = acc[h][m][3] = 0;
      total[h] = 0;
      p[h][0][0] = p[h][0][1] = p[h][1][0] = p[h][1][1] = 0;
      heads[h * 4][0] = -1e30f, heads[h * 4][1] = q.offset[h], shift[h] = 1e30f;
    }
    __syncwarp();  // other lanes write there: `fix`, or `store` where there are no packed tiles
  }
#ifdef KEPT_SCORES
  // Maxima that are known before, in q's units: no weight will need more than 16 bits. `shift` is
  // rounded by half a unit of q's at most, since its parts are 2^23 of them. A maximum one unit
  // higher leaves room for that, and is then taken from what `shift` became.
  __device__ __forceinline__ void fix(const Query& q, const float* highest) {
#pragma unroll
    for (int h = 0; h < HT; h++) {
      if (!(highest[h] > MINUS_INFINITY)) continue;  // no keys
      const float unbiased = -P_BIAS * q.scale[h], whole = q.offset[h] + P_TOP;
      shift[h] = unbiased + (whole - fmaf(highest[h] + 1.f, q.scale[h], q.offset[h]));
      heads[h * 4][0] = whole - (shift[h] - unbiased);
    }
  }
#endif
  __device__ __forceinline__ void add(const u32* v) {
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int i = 0; i < 4; i++) total[h] = __dp4a(p[h][i >> 1][i & 1], 0x01010101u, total[h]);
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
  // The sum of a head's p so far, in the lanes of its two columns: of head 4 h + lane / 8.
  __device__ __forceinline__ u32 whole_total(int h) const {
    u32 sum = total[h] << ((threadIdx.x & 4) ? 0 : 8);
#pragma unroll
    for (int o = 1; o < 8; o <<= 1) sum += __shfl_xor_sync(FULL, sum, o);
    return sum;
  }
  // Raises the maxima of q heads 4 h to 4 h + 3, of which some p needs more than 16 bits, and
  // shifts their sums.
  __device__ __forceinline__ void raise(const float (*f)[8], const Query& q, u32 (*pi)[8], int h) {
    float a = f[h][0];
#pragma unroll
    for (int x = 1; x < 8; x++) a = fmaxf(a, f[h][x]);
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) a = fmaxf(a, __shfl_xor_sync(FULL, a, o));
    __syncwarp();  // what other lanes wrote there, before
    const float top = heads[h * 4][0], offset = heads[h * 4][1];
    const float score = fmaf(a - BIAS, q.scale[h], offset);
    const float raised = score > top - 1.f ? floorf(score) + LIFT : top;
    const int by = (int)fminf(raised - top, 31.f);
    __syncwarp();
    heads[h * 4][0] = raised;
    shift[h] = fmaf(-BIAS, q.scale[h], offset + P_TOP - raised);
    if (__any_sync(FULL, top > -1e30f)) {  // there are sums
#pragma unroll
      for (int m = 0; m < MT; m++) shift_digits(acc[h][m], by);
      const u32 whole = whole_total(h) >> __shfl_sync(FULL, by, (threadIdx.x & 31) >> 3);
      total[h] = (threadIdx.x & 7) == 4 ? whole : 0;
    }
    exponentials(f, q, pi, h);
  }
  __device__ __forceinline__ void to_operand(const u32 (*pi)[8]) {
#pragma unroll
    for (int h = 0; h < HT; h++) to_operand(pi, h);
  }
  __device__ __forceinline__ void to_operand(const u32 (*pi)[8], int h) {
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
      const u32 weight = whole_total(h);
      if ((u.lane & 7) == 0) ml[h * 4 + (u.lane >> 3)][1] = (float)weight;
    }
  }
};
