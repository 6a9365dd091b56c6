// q in B, the softmax, and the sums over V of one warp.
struct __align__(2 * sizeof(query_t)) QueryPair {
  query_t x[2];
};
// q as the B operand, scaled to fp16, and what undoes it for q heads 8 h + 2 t and 8 h + 2 t + 1.
struct Query {
  u32 b[KC][HT][2];
  float scale[HT][2];
  SumsInB<Keys::GROUPS> sums;

  __device__ __forceinline__ void load(const Arguments& at, const Unit& u) {
#pragma unroll
    for (int h = 0; h < HT; h++) {
      const int mine = h * 8 + u.g;
      const query_t* query = query_of(at, u) + mine * CHANNELS;
      float x[KC][4], top = 1e-20f;
#pragma unroll
      for (int k = 0; k < KC; k++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          if (i % 2 == 0) {
            const int c = 16 * k + 2 * u.t + i * 4;
            const QueryPair pair =
                mine < G && c < CHANNELS ? *(const QueryPair*)(query + c) : QueryPair{};
            x[k][i] = query_to_float(pair.x[0]), x[k][i + 1] = query_to_float(pair.x[1]);
          }
          top = fmaxf(top, fabsf(x[k][i]));
        }
      top = fmaxf(top, __shfl_xor_sync(FULL, top, 1));
      top = fmaxf(top, __shfl_xor_sync(FULL, top, 2));
      const float unit = Q_TOP / top;
#pragma unroll
      for (int k = 0; k < KC; k++)
        b[k][h][0] = Keys::divided(pack2(x[k][0] * unit, x[k][1] * unit), k, 0),
        b[k][h][1] = Keys::divided(pack2(x[k][2] * unit, x[k][3] * unit), k, 1);
#pragma unroll
      for (int i = 0; i < 2; i++)
        scale[h][i] =
            __shfl_sync(FULL, top, (2 * u.t + i) * 4) * at.sm_scale * (Keys::UNIT / Q_TOP);
    }
#if K_ALONG_K
    float2 ones[Keys::GROUPS][HT];
    Keys::sum(ones, b);
    sums.set(ones, u.t);
#endif
  }
};

// softmax(q K^T) V of a unit in fp32, weights in fp16 under a maximum that is raised when it has to
// be.
struct Sums {
  float acc[KC][HT][4], weight[HT][2], top[HT][2];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < HT; h++) {
#pragma unroll
      for (int m = 0; m < KC; m++) acc[m][h][0] = acc[m][h][1] = acc[m][h][2] = acc[m][h][3] = 0.f;
      weight[h][0] = weight[h][1] = 0.f;
      top[h][0] = top[h][1] = -1e30f;
    }
  }
  // s: scores (log2 units) of 32 tokens, [row tile][h]; raises what overflows, returns weights in
  // s.
  __device__ __forceinline__ void weigh(float (*s)[HT][4]) {
    float over = 0.f;
    float p[2][HT][4];
    exponentials(p, s, over);
    if (__any_sync(FULL, !(over < TOP_WEIGHT))) {
      raise(s);
      exponentials(p, s, over);
    }
#pragma unroll
    for (int r = 0; r < 2; r++)
#pragma unroll
      for (int h = 0; h < HT; h++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[r][h][i] = p[r][h][i];
  }
  // Adds sums of weights, in units of `Values` as the accumulators are.
  __device__ __forceinline__ void count(const SumsInRegisters& p) {
#pragma unroll
    for (int h = 0; h < HT; h++) weight[h][0] += p.sums[h].x, weight[h][1] += p.sums[h].y;
  }
  __device__ __forceinline__ void exponentials(float (*p)[HT][4], const float (*s)[HT][4],
                                               float& over) const {
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          p[r][h][i] = exp2_fast(s[r][h][i] - top[h][i & 1]);
          over = fmaxf(over, p[r][h][i]);
        }
  }
  __device__ __forceinline__ void raise(const float (*s)[HT][4]) {
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float a = fmaxf(fmaxf(s[0][h][i], s[0][h][i + 2]), fmaxf(s[1][h][i], s[1][h][i + 2]));
#pragma unroll
        for (int o = 4; o < 32; o <<= 1) a = fmaxf(a, __shfl_xor_sync(FULL, a, o));
        const float raised = fmaxf(top[h][i], a - LIFT), by = exp2_fast(top[h][i] - raised);
        top[h][i] = raised;
        weight[h][i] *= by;
#pragma unroll
        for (int m = 0; m < KC; m++) acc[m][h][i] *= by, acc[m][h][i + 2] *= by;
      }
  }
  __device__ __forceinline__ void store(const Unit& u, float* rows, float (*ml)[2]) {
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        float* row = rows + (h * 8 + 2 * u.t + i) * (D + 8) + u.g;
#pragma unroll
        for (int m = 0; m < KC; m++) row[16 * m] = acc[m][h][i], row[16 * m + 8] = acc[m][h][i + 2];
        const float l = weight[h][i] * Values::UNIT;
        if (u.g == 0) ml[h * 8 + 2 * u.t + i][0] = top[h][i], ml[h * 8 + 2 * u.t + i][1] = l;
      }
  }
};
