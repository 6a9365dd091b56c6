// q in B, the softmax, and the sums over V of one warp.
//
// Expects dense/operands.cuh.

// Two numbers of q; rows are aligned to four.
struct __align__(2 * sizeof(query_t)) QueryPair {
  query_t x[2];
};

// q as the B operand: column 2 i + j of tile h is digit j of q head 4 h + i.
struct Query {
  u32 b[KC][HT][2];

  __device__ __forceinline__ void load(const Call& at, const Unit& u) {
#pragma unroll
    for (int h = 0; h < HT; h++) {
      const int mine = h * 4 + u.g / 2;
      const query_t* query = at.query + ((size_t)u.head * G + mine) * CHANNELS;
#pragma unroll
      for (int k = 0; k < KC; k++)
#pragma unroll
        for (int i = 0; i < 2; i++)
          b[k][h][i] =
              G % 4 == 0 || mine < G ? digits(query + 16 * k + 2 * u.t + 8 * i, u.g % 2) : 0;
    }
  }
  // Digits 0 of two numbers, what they are rounded to, or digits 1, what is left.
  static __device__ __forceinline__ u32 digits(const query_t* at, int digit) {
    const QueryPair pair = *(const QueryPair*)at;
    const float low = query_to_float(pair.x[0]), high = query_to_float(pair.x[1]);
    const u32 rounded = pack2(low, high);
    const u32 rest = pack2(low - low_half(rounded), high - low_half(rounded >> 16));
    return digit ? rest : rounded;
  }
  // s: products of tokens g and g + 8 with q heads 4 h + t.
  __device__ __forceinline__ void dot(float (*s)[2], u32 keys, int lane) const {
    float c[HT][4];
#pragma unroll
    for (int h = 0; h < HT; h++) c[h][0] = c[h][1] = c[h][2] = c[h][3] = 0.f;
#pragma unroll
    for (int k = 0; k < KC; k++) {
      u32 a[4];
      load_chunk<false>(a, keys, k, lane);
#pragma unroll
      for (int h = 0; h < HT; h++) mma(c[h], a, b[k][h]);
    }
#pragma unroll
    for (int h = 0; h < HT; h++) s[h][0] = c[h][0] + c[h][1], s[h][1] = c[h][2] + c[h][3];
  }
};

// softmax(q K^T) V of a unit in fp32, under a maximum that is raised when it has to be.
struct Sums {
  float acc[KC][HT][4], weight[HT], top[HT];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < HT; h++) {
#pragma unroll
      for (int m = 0; m < KC; m++) acc[m][h][0] = acc[m][h][1] = acc[m][h][2] = acc[m][h][3] = 0.f;
      weight[h] = 0.f, top[h] = -1e30f;
    }
  }
  // s: scores (log2 units) of a packed tile; returns weights in s.
  __device__ __forceinline__ void weigh(float (*s)[HT][2]) {
    float p[KT][HT][2], over = 0.f;
    exponentials(p, s, over);
    if (__any_sync(FULL, !(over < TOP_WEIGHT))) {
      raise(s);
      exponentials(p, s, over);
    }
#pragma unroll
    for (int k = 0; k < KT; k++)
#pragma unroll
      for (int h = 0; h < HT; h++)
        weight[h] += p[k][h][0] + p[k][h][1], s[k][h][0] = p[k][h][0], s[k][h][1] = p[k][h][1];
  }
  __device__ __forceinline__ void exponentials(float (*p)[HT][2], const float (*s)[HT][2],
                                               float& over) const {
#pragma unroll
    for (int k = 0; k < KT; k++)
#pragma unroll
      for (int h = 0; h < HT; h++)
#pragma unroll
        for (int r = 0; r < 2; r++) {
          p[k][h][r] = exp2_fast(s[k][h][r] - top[h]);
          over = fmaxf(over, p[k][h][r]);
        }
  }
  __device__ __forceinline__ void raise(const float (*s)[HT][2]) {
#pragma unroll
    for (int h = 0; h < HT; h++) {
      float a = fmaxf(s[0][h][0], s[0][h][1]);
#pragma unroll
      for (int k = 1; k < KT; k++) a = fmaxf(a, fmaxf(s[k][h][0], s[k][h][1]));
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) a = fmaxf(a, __shfl_xor_sync(FULL, a, o));
      const float raised = fmaxf(top[h], a - LIFT), by = exp2_fast(top[h] - raised);
      top[h] = raised;
      weight[h] *= by;
      // The other digit's column is in this lane, too.
#pragma unroll
      for (int m = 0; m < KC; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[m][h][i] *= by;
    }
  }
  // p: weights of 16 tokens, whose V is at `values`.
  __device__ __forceinline__ void add(const float (*p)[2], u32 values, int lane) {
    u32 b[HT][2];
#pragma unroll
    for (int h = 0; h < HT; h++)
      b[h][0] = transpose8x8(two_digits(p[h][0])), b[h][1] = transpose8x8(two_digits(p[h][1]));
#pragma unroll
    for (int m = 0; m < KC; m++) {
      u32 a[4];
      load_chunk<true>(a, values, m, lane);
#pragma unroll
      for (int h = 0; h < HT; h++) mma(acc[m][h], a, b[h]);
    }
  }
  __device__ __forceinline__ void store(const Unit& u, float* rows, float (*ml)[2]) const {
#pragma unroll
    for (int h = 0; h < HT; h++) {
      float* row = rows + (h * 4 + u.t) * (D + 8);
#pragma unroll
      for (int m = 0; m < KC; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          row[16 * m + u.g + 8 * half] = acc[m][h][2 * half] + acc[m][h][2 * half + 1];
      float l = weight[h];
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) l += __shfl_xor_sync(FULL, l, o);
      if (u.g == 0) ml[h * 4 + u.t][0] = top[h], ml[h * 4 + u.t][1] = l;
    }
  }
};
