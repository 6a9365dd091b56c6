// Output of a tile's sums: scaled, with GATED gated, rounded, written as rows of tokens.

// Factors of the sums of a thread's two outs, a distance of eight.
struct Scales {
  float out[2], w0[2], bias[2];

  __device__ __forceinline__ void find(const float* scale, const void* first, const void* added,
                                       int o) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      out[h] = scale[o + 8 * h];
      w0[h] = load<W0>(first, o + 8 * h), bias[h] = load<BIAS>(added, o + 8 * h);
    }
  }
  __device__ __forceinline__ float scaled(const Arguments& at, int sum, float row_scale, float x0,
                                          int h) const {
    const float whole = GATED ? (float)sum : (float)sum * at.factor;
    float y = __fmul_rn(__fmul_rn(whole, row_scale), out[h]);
    if (X0 != 3) y = __fadd_rn(y, __fmul_rn(x0, w0[h]));
    if (BIAS != 3) y = __fadd_rn(y, bias[h]);
    return y;
  }
};

// x times a sigmoid of two approximations of 2^-22, as kernels/triton/activation.py has it.
__device__ __forceinline__ float activated(float x) {
  float z = x, e;
  if (GATED == 2) z = 1.702f * x;
  if (GATED == 3) z = 1.5957691216057308f * (x + 0.044715f * x * x * x);
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(e) : "f"(z * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(e) : "f"(e + 1.f));
  return x * e;
}

// Where a thread's numbers of y are: its outs (two rows of eight), and what they are scaled by.
struct Outputs {
  int out, token, g, c, group;
  float row_scale;
  Scales scales, up;
  u32 staging;  // of this warpgroup: two times [16 tokens][64 outs] of 16 bits

  // Outputs of the row-th 64 outs of this warpgroup.
  __device__ __forceinline__ void find(const Arguments& at, const Tile& tile, u32 memory, int row) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    group = threadIdx.x >> 7, g = lane >> 2, c = lane & 3;
    out = tile.out + (group % SUB_BLOCK_GROUPS * WRITTEN_ROWS + row) * 64, token = tile.token;
    staging = memory + group * (2 * STAGING_BYTES);
    // Nobody reads what was transposed before any more.
    asm volatile("bar.sync %0,128;" ::"r"(GROUP_BARRIER + group) : "memory");
    row_scale = at.row_scale[0];
    scales.find(at.out_scale, at.w0, at.bias, out + 16 * warp + g);
    if (GATED) up.find(at.up_scale, at.w0, at.up_bias, out + 16 * warp + g);
  }
  // y of token t, from its sum or from gate's and up's.
  __device__ __forceinline__ float value(const Arguments& at, int sum, int up_sum, int t,
                                         int h) const {
    // Loads that a token beyond the last one leaves out cost fewer registers than a clamp of t.
    const bool is_there = t < at.tokens;
    float by = row_scale, x0 = 0.f;
    if (PER_ROW) by = is_there ? at.row_scale[t] : 0.f;
    if (X0 != 3 && is_there) x0 = load<X0>(at.x0, t);
    const float y = scales.scaled(at, sum, by, x0, h);
    return GATED ? activated(y) * up.scaled(at, up_sum, by, x0, h) : y;
  }
  // Sixteen tokens from 16 j on; sums as `multiply` has them, up_sums for GATED.
  __device__ __forceinline__ void store(const Arguments& at, int j, const int* sums,
                                        const int* up_sums) const {
    const int warp = threadIdx.x >> 5 & 3;
    int first = token + 16 * j;
    // Addresses of all sixteens at one time would take registers that sums have.
    asm volatile("" : "+r"(first)::"memory");
#if OUT == 2
#pragma unroll
    for (int n = 0; n < 8; n++) {
      const int t = first + n / 4 * 8 + 2 * c + n % 2, h = n / 2 % 2;
      float* y = (float*)at.y + (long long)t * at.outs + out + 16 * warp + 8 * h + g;
      if (t < at.tokens) *y = value(at, sums[n], up_sums[n], t, h);
    }
#else
    const int lane = threadIdx.x & 31;
    u32 pair[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {  // eight tokens, eight outs: matrix n
      const int t = first + n / 2 * 8 + 2 * c, h = n % 2;
      const float low = value(at, sums[2 * n], up_sums[2 * n], t, h);
      const float high = value(at, sums[2 * n + 1], up_sums[2 * n + 1], t + 1, h);
      if (OUT == 1) asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(pair[n]) : "f"(high), "f"(low));
      if (OUT == 0) asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(pair[n]) : "f"(high), "f"(low));
    }
    // Rows of tokens, through shared memory: a token's 64 outs are 128 bytes, whose pieces of 16
    // are in the order that uses different banks.
    const u32 here = staging + j % 2 * STAGING_BYTES;
    const int own = lane / 16 * 8 + lane % 8, piece = 2 * warp + lane / 8 % 2;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0],{%1,%2,%3,%4};" ::"r"(
                     here + own * 128 + (piece ^ own % 8) * 16),
                 "r"(pair[0]), "r"(pair[1]), "r"(pair[2]), "r"(pair[3])
                 : "memory");
    asm volatile("bar.sync %0,128;" ::"r"(GROUP_BARRIER + group) : "memory");
    const int thread = threadIdx.x & 127, row = thread / 8, eight = thread % 8;
    u32 v[4];
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                 : "r"(here + row * 128 + (eight ^ row % 8) * 16));
    if (first + row < at.tokens) {
      unsigned short* y = (unsigned short*)at.y + (long long)(first + row) * at.outs + out;
      *(uint4*)(y + 8 * eight) = make_uint4(v[0], v[1], v[2], v[3]);
    }
#endif
  }
};
