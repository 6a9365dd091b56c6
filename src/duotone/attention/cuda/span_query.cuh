// q as integers of two digits, and the products of 64 keys.
// What a block needs before its first key and after its last one.
struct __align__(16) Prologue {
  u32 digits[HEADS][2][D / 4];  // [head][high, low][t][register]: channels 16 r + 4 t to + 3
  float v_scale[D], v_zero[D];
  int bias[4];
  float heads[HEADS][2];
#ifdef KEPT_SCORES
  float sums[HEADS][2];  // of the negative and of the positive channels, in units of the largest
#endif
};

// Fours of channels of a lane, and V's of a thread.
#define FOURS ((D / 4 + 31) / 32)
#define V_FOURS ((CHANNELS / 4 + WARPS * 32 - 1) / (WARPS * 32))

__device__ __forceinline__ float4 floats_of(uint2 halves) {
  return make_float4(half_to_float((u16)halves.x), half_to_float((u16)(halves.x >> 16)),
                     half_to_float((u16)halves.y), half_to_float((u16)(halves.y >> 16)));
}

// Scales and zero-points of a span, in registers. They are asked for ahead of the first records:
// behind those, an answer takes microseconds, while memory serves all blocks' records.
struct Params {
  uint2 k_scale[FOURS], k_zero[FOURS], v_scale[V_FOURS], v_zero[V_FOURS];

  __device__ __forceinline__ void load(const Arguments& at, const Unit& u) {
    const size_t row = (size_t)u.row * CHANNELS;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
      const size_t c = row + min(of_lane(u, i), CHANNELS - 4);
      k_scale[i] = *(const uint2*)(at.k_scale + c), k_zero[i] = *(const uint2*)(at.k_zero + c);
    }
#pragma unroll
    for (int i = 0; i < V_FOURS; i++) {
      const size_t c = row + min(of_thread(u, i), CHANNELS - 4);
      v_scale[i] = *(const uint2*)(at.v_scale + c), v_zero[i] = *(const uint2*)(at.v_zero + c);
    }
  }
  __device__ __forceinline__ void store_value(const Unit& u, Prologue& p) const {
#pragma unroll
    for (int i = 0; i < V_FOURS; i++) {
      const int c = of_thread(u, i);
      if (c >= CHANNELS) continue;
      *(float4*)(p.v_scale + c) = floats_of(v_scale[i]);
      *(float4*)(p.v_zero + c) = floats_of(v_zero[i]);
    }
  }
  static __device__ __forceinline__ int of_lane(const Unit& u, int i) {
    return (i * 32 + u.lane) * 4;
  }
  // V's go to the last threads: the first ones have q.
  static __device__ __forceinline__ int of_thread(const Unit& u, int i) {
    return ((i + 1) * WARPS * 32 - 1 - u.tid) * 4;
  }
};

// q with K's scales folded in, as integers of two digits in the order of B, and what undoes it.
struct Query {
  u32 digits[HT][KREGS];
  int bias[4];                  // of the digits' sums
  float scale[HT], offset[HT];  // score * log2(e) = scale * (integer product) + offset

  // q may be written until `fold` waits for it, into L2, where it is read from.
  static __device__ __forceinline__ void hint(const Call& at, const Unit& u) {
    constexpr int LINE = 128, BYTES = G * CHANNELS * sizeof(query_t);
    if (u.tid * LINE < BYTES)
      asm volatile("prefetch.global.L2 [%0];" ::"l"((const char*)at.query +
                                                     (size_t)u.head * BYTES + u.tid * LINE));
  }
  static __device__ __forceinline__ float4 load_four(const query_t* q) {
#if QUERY == 2
    return *(const float4*)q;
#else
    const uint2 x = *(const uint2*)q;
    return make_float4(query_to_float((u16)x.x), query_to_float((u16)(x.x >> 16)),
                       query_to_float((u16)x.y), query_to_float((u16)(x.y >> 16)));
#endif
  }
  __device__ __forceinline__ void fold(const Arguments& at, const Unit& u, const Params& params,
                                       Prologue& p) {
    params.store_value(u, p);
    if (u.tid < 4) p.bias[u.tid] = SMALL_DOTS && !(u.tid & 1) ? 0 : BIAS_BITS;
    wait_for_query();
    for (int h = u.warp; h < HEADS; h += WARPS) fold_head(at, u, params, p, h);
    sync_team(u);
    // Loaded, so that the compiler keeps them instead of making them anew for every product.
    asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(bias[0]), "=r"(bias[1]), "=r"(bias[2]), "=r"(bias[3])
                 : "r"(shared_address(p.bias)));
#pragma unroll
    for (int h = 0; h < HT; h++) {
      const u32* own = p.digits[h * 4 + (u.g >> 1)][u.g & 1] + u.t * KREGS;
#pragma unroll
      for (int r = 0; r < KREGS; r += 2) {
        const uint2 two = *(const uint2*)(own + r);
        digits[h][r] = two.x, digits[h][r + 1] = two.y;
      }
      scale[h] = p.heads[h * 4 + u.t][0];
      offset[h] = p.heads[h * 4 + u.t][1];
    }
  }
  static __device__ __forceinline__ void fold_head(const Arguments& at, const Unit& u,
                                                   const Params& params, Prologue& p, int h) {
    float folded[FOURS][4], sum = 0.f, top = 0.f;
    const query_t* query = at.query + ((size_t)u.head * G + h) * CHANNELS;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
      const int c = Params::of_lane(u, i);
      float4 q = make_float4(0.f, 0.f, 0.f, 0.f);
      if (h < G && c < CHANNELS) q = load_four(query + c);
      const float4 s = floats_of(params.k_scale[i]), z = floats_of(params.k_zero[i]);
      folded[i][0] = q.x * s.x, folded[i][1] = q.y * s.y;
      folded[i][2] = q.z * s.z, folded[i][3] = q.w * s.w;
      sum = fmaf(q.x, z.x, fmaf(q.y, z.y, fmaf(q.z, z.z, fmaf(q.w, z.w, sum))));
#pragma unroll
      for (int j = 0; j < 4; j++) top = fmaxf(top, fabsf(folded[i][j]));
    }
    sum = sum_of_lanes(sum);
    // Bits of numbers that are not negative order as they do.
    top = fmaxf(__uint_as_float(__reduce_max_sync(FULL, __float_as_uint(top))), 1e-20f);
    const float inverse = Q_TOP / (1 << Q_SHIFT) / top;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
      const int four = i * 32 + u.lane, r = four / 4, place = four % 4 * KREGS + r;
      const float by = inverse * (float)(1 << (Q_SHIFT - K_PLACE(r)));
      const auto integer = [&](int j) { return __float_as_int(fmaf(folded[i][j], by, BIAS)); };
      const int4 x = make_int4(integer(0), integer(1), integer(2), integer(3));
      if (four < D / 4)
        p.digits[h][0][place] = digits_of(x, 0), p.digits[h][1][place] = digits_of(x, 1);
    }
    if (u.lane == 0) p.heads[h][0] = top * at.sm_scale / Q_TOP, p.heads[h][1] = sum * at.sm_scale;
#ifdef KEPT_SCORES
    float low = 0.f, high = 0.f;
#pragma unroll
    for (int i = 0; i < FOURS; i++)
#pragma unroll
      for (int j = 0; j < 4; j++)
        low += fminf(folded[i][j], 0.f), high += fmaxf(folded[i][j], 0.f);
    low = sum_of_lanes(low), high = sum_of_lanes(high);
    if (u.lane == 0) p.sums[h][0] = low / top, p.sums[h][1] = high / top;
#endif
  }
  static __device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(FULL, x, o);
    return x;
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
