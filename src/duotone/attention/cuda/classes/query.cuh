// Products of q's digits with K, whether K's parameters belong to tiles or to spans.
__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 d;
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ void unpack2(float* x, u32 pair) {
  asm("{.reg .b16 low,high;\n mov.b32 {low,high},%2;\n cvt.f32.f16 %0,low;\n cvt.f32.f16 %1,high;}"
      : "=f"(x[0]), "=f"(x[1])
      : "r"(pair));
}
// q's digits as operands, and the biases of their sums.
struct Digits {
  u32 digits[HT][Keys::COLUMNS];  // B: column g is the high (even g) or low digit of head g / 2
  int bias[4];

  __device__ __forceinline__ void load_bias(const int* from) {
    // Loaded, so that the compiler keeps them instead of making them anew for every product.
    asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(bias[0]), "=r"(bias[1]), "=r"(bias[2]), "=r"(bias[3])
                 : "r"(shared_address(from)));
  }
  // Integer products of 64 keys: keys 16 * (x / 2) + 8 * (x % 2) + g, q head 4 h + t.
  __device__ __forceinline__ void dot(float (*f)[8], u32 tile, int lane) const {
    u32 k[Keys::WORDS];
    int s[4][HT][4];
    const u32 first = lane & 2 ? 0 : FULL;
    load_words<Keys::WORDS>(k, tile, lane);
    dot_keys<0, 0>(s[0], k, digits, bias, first);
    dot_keys<1, 0>(s[1], k, digits, bias, first);
    dot_keys<2, 0>(s[2], k, digits, bias, first);
    dot_keys<3, 0>(s[3], k, digits, bias, first);
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int x = 0; x < 8; x++) {
        const int* c = s[x >> 1][h] + (x & 1) * 2;
        f[h][x] = fmaf(__int_as_float(c[0]) - BOTH_BIASES, 256.f, __int_as_float(c[1]));
      }
  }
};

__device__ __forceinline__ void hide_after(float (*f)[8], int left, int g) {
#pragma unroll
  for (int x = 0; x < 8; x++)
    if (16 * (x >> 1) + 8 * (x & 1) + g >= left)
#pragma unroll
      for (int h = 0; h < HT; h++) f[h][x] = MINUS_INFINITY;
}
