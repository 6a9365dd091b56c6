// q as integers of two digits, and the products of 64 keys.
// What a block needs before its first key and after its last one.
struct __align__(16) Prologue {
  int query[HEADS][D];  // integers in the low bits, above BIAS_BITS
  int bias[4];
  float heads[HEADS][2], v_scale[D], v_zero[D];
#ifdef KEPT_SCORES
  float sums[HEADS][2];  // of the negative and of the positive channels, in units of the largest
#endif
};

// V's channels of a thread.
#define OF_A_THREAD ((CHANNELS + WARPS * 32 - 1) / (WARPS * 32))

// Scales and zero-points of a span, in registers: K's channel 32 i + lane, V's i * threads + tid.
// They do not wait for q, so that one answer of memory less stands between q and the first score.
struct Params {
  u16 k_scale[D / 32], k_zero[D / 32], v_scale[OF_A_THREAD], v_zero[OF_A_THREAD];

  __device__ __forceinline__ void load(const Arguments& at, const Unit& u) {
    const size_t row = (size_t)u.row * CHANNELS;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      const size_t c = row + min(i * 32 + u.lane, CHANNELS - 1);
      k_scale[i] = at.k_scale[c], k_zero[i] = at.k_zero[c];
    }
#pragma unroll
    for (int i = 0; i < OF_A_THREAD; i++) {
      const size_t c = row + min(i * WARPS * 32 + u.tid, CHANNELS - 1);
      v_scale[i] = at.v_scale[c], v_zero[i] = at.v_zero[c];
    }
  }
};

// q with K's scales folded in, as integers of two digits in the order of B, and what undoes it.
struct Query {
  u32 digits[HT][KREGS];
  int bias[4];                  // of the digits' sums
  float scale[HT], offset[HT];  // score * log2(e) = scale * (integer product) + offset

  __device__ __forceinline__ void fold(const Arguments& at, const Unit& u, Prologue& p) {
    Params params;
    params.load(at, u);
    wait_for_query();
    const query_t* query = at.query + (size_t)u.head * G * CHANNELS;
    for (int h = u.warp; h < HEADS; h += WARPS) {
      float top = 0.f, sum = 0.f, folded[D / 32];
#pragma unroll
      for (int i = 0; i < D / 32; i++) {
        const int c = i * 32 + u.lane;
        const bool real = h < G && c < CHANNELS;
        const float x = real ? query_to_float(query[h * CHANNELS + c]) : 0.f;
        folded[i] = real ? x * half_to_float(params.k_scale[i]) : 0.f;
        if (real) sum = fmaf(x, half_to_float(params.k_zero[i]), sum);
        top = fmaxf(top, fabsf(folded[i]));
      }
#pragma unroll
      for (int o = 16; o; o >>= 1) {
        top = fmaxf(top, __shfl_xor_sync(FULL, top, o));
        sum += __shfl_xor_sync(FULL, sum, o);
      }
      top = fmaxf(top, 1e-20f);
      const float inverse = Q_TOP / (1 << Q_SHIFT) / top;
#pragma unroll
      for (int i = 0; i < D / 32; i++) {
        const int c = i * 32 + u.lane, r = c / 16;
        p.query[h][c] =
            __float_as_int(fmaf(folded[i], inverse * (float)(1 << (Q_SHIFT - K_PLACE(r))), BIAS));
      }
      if (u.lane == 0) p.heads[h][0] = top, p.heads[h][1] = sum * at.sm_scale;
#ifdef KEPT_SCORES
      float low = 0.f, high = 0.f;
#pragma unroll
      for (int i = 0; i < D / 32; i++) low += fminf(folded[i], 0.f), high += fmaxf(folded[i], 0.f);
#pragma unroll
      for (int o = 16; o; o >>= 1) {
        low += __shfl_xor_sync(FULL, low, o);
        high += __shfl_xor_sync(FULL, high, o);
      }
      if (u.lane == 0) p.sums[h][0] = low / top, p.sums[h][1] = high / top;
#endif
    }
    if (u.tid < 4) p.bias[u.tid] = SMALL_DOTS && !(u.tid & 1) ? 0 : BIAS_BITS;
#pragma unroll
    for (int i = 0; i < OF_A_THREAD; i++) {
      const int c = i * WARPS * 32 + u.tid;
      if (c < CHANNELS) {
        p.v_scale[c] = half_to_float(params.v_scale[i]);
        p.v_zero[c] = half_to_float(params.v_zero[i]);
      }
    }
    __syncthreads();
    // Loaded, so that the compiler keeps them instead of making them anew for every product.
    asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(bias[0]), "=r"(bias[1]), "=r"(bias[2]), "=r"(bias[3])
                 : "r"(shared_address(p.bias)));
#pragma unroll
    for (int h = 0; h < HT; h++) {
#pragma unroll
      for (int r = 0; r < KREGS; r++)
        digits[h][r] = digits_of(&p.query[h * 4 + (u.g >> 1)][16 * r + 4 * u.t], u.g);
      scale[h] = p.heads[h * 4 + u.t][0] * at.sm_scale / Q_TOP;
      offset[h] = p.heads[h * 4 + u.t][1];
    }
  }
  // Integer products of 64 keys plus BIAS: keys 16 * (x / 2) + 8 * (x % 2) + g, q head 4 h + t.
  __device__ __forceinline__ void dot(float (*f)[8], u32 tile, int lane) const {
    u32 k[KWORDS];
    int s[4][HT][4];
    load_words<KWORDS>(k, tile, lane);
    KDot<0, 0>::run(s[0], k, digits, bias);
    KDot<1, 0>::run(s[1], k, digits, bias);
    KDot<2, 0>::run(s[2], k, digits, bias);
    KDot<3, 0>::run(s[3], k, digits, bias);
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int x = 0; x < 8; x++) {
        const int* c = s[x >> 1][h] + (x & 1) * 2;
        f[h][x] = SMALL_DOTS ? __int_as_float(c[0] * 256 + c[1])
                             : fmaf(__int_as_float(c[0]) - BIAS, 256.f, __int_as_float(c[1]));
      }
  }
};

__device__ __forceinline__ void hide_behind(float (*f)[8], int left, int g, float value) {
#pragma unroll
  for (int x = 0; x < 8; x++)
    if (16 * (x >> 1) + 8 * (x & 1) + g >= left)
#pragma unroll
      for (int h = 0; h < HT; h++) f[h][x] = value;
}
