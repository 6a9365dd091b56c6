// q in B, the softmax, and the sums over V of one warp, 16 tokens at a time.
#if KV == 1
#define KV_TYPE "bf16"
#else
#define KV_TYPE "f16"
#endif

__device__ __forceinline__ void mma(float* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32." KV_TYPE "." KV_TYPE
      ".f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ u32 pack2(float low, float high) {
  u32 d;
  asm("cvt.rn." KV_TYPE "x2.f32 %0,%1,%2;" : "=r"(d) : "f"(high), "f"(low));
  return d;
}
__device__ __forceinline__ float low_half(u32 x) {
  return KV == 1 ? __uint_as_float(x << 16) : half_to_float((u16)x);
}
// x as two digits: x rounded, and what is left.
__device__ __forceinline__ u32 two_digits(float x) {
  const float rest = x - low_half(pack2(x, 0.f));
  return pack2(x, rest);
}
// Four 8x8 matrices; a lane's address is that of a row.
template <bool TRANSPOSED>
__device__ __forceinline__ void load_matrices(u32* a, u32 address) {
  if (TRANSPOSED)
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
  else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3},[%4];"
                 : "=r"(a[0]), "=r"(a[1]), "=r"(a[2]), "=r"(a[3])
                 : "r"(address));
}

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
        for (int i = 0; i < 2; i++) {
          const int c = 16 * k + 2 * u.t + 8 * i;
          const u32 first = mine < G ? two_digits(query_to_float(query[c])) : 0;
          const u32 second = mine < G ? two_digits(query_to_float(query[c + 1])) : 0;
          b[k][h][i] = __byte_perm(first, second, u.g % 2 ? 0x7632 : 0x5410);
        }
    }
  }
  // s: products of tokens g and g + 8 with q heads 4 h + t.
  __device__ __forceinline__ void dot(float (*s)[2], u32 keys, int lane) const {
    const u32 row = keys + (lane & 15) * ROW_BYTES + (lane >> 4) * 16;
    float c[HT][4];
#pragma unroll
    for (int h = 0; h < HT; h++) c[h][0] = c[h][1] = c[h][2] = c[h][3] = 0.f;
#pragma unroll
    for (int k = 0; k < KC; k++) {
      u32 a[4];
      load_matrices<false>(a, row + k * 32);
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
  // s: scores (log2 units); returns weights in s.
  __device__ __forceinline__ void weigh(float (*s)[2]) {
    float p[HT][2], over = 0.f;
    exponentials(p, s, over);
    if (__any_sync(FULL, !(over < TOP_WEIGHT))) {
      raise(s);
      exponentials(p, s, over);
    }
#pragma unroll
    for (int h = 0; h < HT; h++)
      weight[h] += p[h][0] + p[h][1], s[h][0] = p[h][0], s[h][1] = p[h][1];
  }
  __device__ __forceinline__ void exponentials(float (*p)[2], const float (*s)[2],
                                               float& over) const {
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        p[h][r] = exp2_fast(s[h][r] - top[h]);
        over = fmaxf(over, p[h][r]);
      }
  }
  __device__ __forceinline__ void raise(const float (*s)[2]) {
#pragma unroll
    for (int h = 0; h < HT; h++) {
      float a = fmaxf(s[h][0], s[h][1]);
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
  __device__ __forceinline__ void add(const float (*p)[2], u32 values, int lane) {
    u32 b[HT][2];
#pragma unroll
    for (int h = 0; h < HT; h++)
      b[h][0] = transpose8x8(two_digits(p[h][0])), b[h][1] = transpose8x8(two_digits(p[h][1]));
    const u32 row = values + ((lane & 7) + (lane >> 4) * 8) * ROW_BYTES + (lane >> 3 & 1) * 16;
#pragma unroll
    for (int m = 0; m < KC; m++) {
      u32 a[4];
      load_matrices<true>(a, row + m * 32);
#pragma unroll
      for (int h = 0; h < HT; h++) mma(acc[m][h], a, b[h]);
    }
  }
  __device__ __forceinline__ void store(const Unit& u, float* rows, float (*ml)[2]) const {
#pragma unroll
    for (int h = 0; h < HT; h++) {
      float* row = rows + (h * 4 + u.t) * (D + 8) + u.g;
#pragma unroll
      for (int m = 0; m < KC; m++)
        row[16 * m] = acc[m][h][0] + acc[m][h][1], row[16 * m + 8] = acc[m][h][2] + acc[m][h][3];
      float l = weight[h];
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) l += __shfl_xor_sync(FULL, l, o);
      if (u.g == 0) ml[h * 4 + u.t][0] = top[h], ml[h * 4 + u.t][1] = l;
    }
  }
};
