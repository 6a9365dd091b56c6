// q as integers of two digits, and the products of 64 keys.
#include "spans/prologue.cuh"

// q with K's scales folded in, as integers of two digits in the order of B, and what undoes it.
struct Query {
  u32 digits[HT][KREGS];
  int bias[4];                  // of the digits' sums
  float scale[HT], offset[HT];  // score * log2(e) = scale * (integer product) + offset

  __device__ __forceinline__ void fold(const Arguments& at, const Unit& u, const Params& params,
                                       QueryFours loaded, Prologue& p) {
    params.store_value(u, p);
    if (u.tid < 4) p.bias[u.tid] = SMALL_DOTS && !(u.tid & 1) ? 0 : BIAS_BITS;
    for (int h = u.warp; h < HEADS; h += WARPS) {
      if (h != u.warp) loaded.load(at, u, h);
      fold_head(at, u, params, loaded, p, h);
    }
    sync_sub_block(u);
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
                                                   const Params& params, const QueryFours& loaded,
                                                   Prologue& p, int h) {
    float folded[FOURS][4], sum = 0.f, top = 0.f;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
      const float4 q = loaded.floats(i);
      const float4 s = params.k_scale[i].floats();
      const float4 z = lowest_levels<KB>(params.k_zero[i].floats(), s);
      folded[i][0] = q.x * s.x, folded[i][1] = q.y * s.y;
      folded[i][2] = q.z * s.z, folded[i][3] = q.w * s.w;
      sum = fmaf(q.x, z.x, fmaf(q.y, z.y, fmaf(q.z, z.z, fmaf(q.w, z.w, sum))));
#pragma unroll
      for (int j = 0; j < 4; j++) top = fmaxf(top, fabsf(folded[i][j]));
    }
    sum = sum_of_lanes(sum);
    top = fmaxf(most_of_lanes(top), 1e-20f);
    const float inverse = Q_TOP / (1 << Q_SHIFT) / top;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
      const int four = i * 32 + u.lane, r = four / 4, at_word = four % 4 * KREGS + r;
      const float by = inverse * (float)(1 << (Q_SHIFT - K_BIT(r)));
      const auto integer = [&](int j) { return __float_as_int(fmaf(folded[i][j], by, BIAS)); };
      const int4 x = make_int4(integer(0), integer(1), integer(2), integer(3));
      if (four < D / 4)
        p.digits[h][0][at_word] = digits_of(x, 0), p.digits[h][1][at_word] = digits_of(x, 1);
    }
    if (u.lane == 0) p.heads[h][0] = top * at.sm_scale / Q_TOP, p.heads[h][1] = sum * at.sm_scale;
#ifdef KEPT_SCORES
    float low = 0.f, high = 0.f;
#pragma unroll
    for (int i = 0; i < FOURS; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) low += fminf(folded[i][j], 0.f), high += fmaxf(folded[i][j], 0.f);
    low = sum_of_lanes(low), high = sum_of_lanes(high);
    if (u.lane == 0) p.sums[h][0] = low / top, p.sums[h][1] = high / top;
#endif
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

__device__ __forceinline__ void hide_after(float (*f)[8], int left, int g, float value) {
#pragma unroll
  for (int x = 0; x < 8; x++)
    if (16 * (x >> 1) + 8 * (x & 1) + g >= left)
#pragma unroll
      for (int h = 0; h < HT; h++) f[h][x] = value;
}
