// q where K's parameters lie in its tiles: q is gathered anew in every tile's coded channels.
#define ROWS (HT == 1 ? 4 : 8)  // q heads that meet zero-points in one chain of products
#define CHAINS ((HEADS + ROWS - 1) / ROWS)

__device__ __forceinline__ void mma_plain(float* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void load4(u32* x, u32 address) {
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}
// K's largest scales of a lane's channels.
struct KeyParameters {
  uint2 top[FOURS];

  __device__ __forceinline__ void load(const Arguments& at, const Unit& u) {
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
      const int c = min(channels_of(u, i), CHANNELS - 4);
      top[i] = *(const uint2*)(at.k_top + (size_t)u.row * CHANNELS + c);
    }
  }
};
// A block's q before its first key.
struct __align__(16) Table {
  float query[HT][D][4];  // by channel, times what makes integers of it with a scale of K
  // q in fp16 as A of the products with zero-points: row g what rounding keeps, row g + 8 the rest.
  u32 plain[CHAINS][D / 16][ROWS][4][4];

  // heads: the largest |q| * scale, and the largest |q|.
  __device__ __forceinline__ void fold(const Unit& u, const KeyParameters& keys,
                                       const QueryFours& loaded, int h, float (*heads)[2]) {
    float top = 0.f, folded = 0.f;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
      const float4 x = loaded.floats(i), s = floats_of(keys.top[i]);
      top = fmaxf(top, fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
      folded = fmaxf(folded, fmaxf(fmaxf(fabsf(x.x) * s.x, fabsf(x.y) * s.y),
                                   fmaxf(fabsf(x.z) * s.z, fabsf(x.w) * s.w)));
    }
    top = fmaxf(most_of_lanes(top), 1e-20f), folded = fmaxf(most_of_lanes(folded), 1e-20f);
    const float by = Q_TOP / folded, plain_by = PLAIN_TOP / top;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
      const int c = channels_of(u, i);
      if (c >= D) continue;
      const float4 x = loaded.floats(i);
      float (*to)[4] = query[h / 4] + c;
      to[0][h % 4] = x.x * by, to[1][h % 4] = x.y * by;
      to[2][h % 4] = x.z * by, to[3][h % 4] = x.w * by;
      put_plain(h, c, x.x * plain_by, x.y * plain_by, x.z * plain_by, x.w * plain_by);
    }
    if (u.lane == 0) heads[h][0] = folded, heads[h][1] = top;
  }
  // Zero-points stand in the order of the channels, and a lane reads 8 of them.
  // Channel 32 i + 8 t + 4 s + 2 w + b is k = 2 t + 8 w + b of product 2 i + s.
  __device__ __forceinline__ void put_plain(int h, int c, float x0, float x1, float x2, float x3) {
    const u32 first = pack2(x0, x1), second = pack2(x2, x3);
    float kept[4];
    unpack2(kept, first), unpack2(kept + 2, second);
    *(uint4*)plain[h / ROWS][c / 32 * 2 + (c >> 2 & 1)][h % ROWS][c >> 3 & 3] = make_uint4(
        first, pack2(x0 - kept[0], x1 - kept[1]), second, pack2(x2 - kept[2], x3 - kept[3]));
  }
};

struct Query : Digits {
  float offset[HT];                  // q times the zero-points of this tile
  float scale[HT], plain_scale[HT];  // score * log2(e) = scale * (integer product) + offset
  // Where this lane finds q, which bytes of two words it keeps, where its parts of a tile begin.
  u32 table, plain, pick, half, zeros;
  float scale_factor, zero_factor;  // of this tile's parameters of 8 bits

  __device__ __forceinline__ void make(const Arguments& at, const Unit& u, const Table& of,
                                       const float (*heads)[2], const int* biases) {
    load_bias(biases);
    table = pinned(shared_address(of.query) + (u.g >> 1) * 4, u.lane);
    pick = pinned(u.g & 1 ? 0x3276 : 0x5410, u.lane);
    half = pinned(4 * u.t + 2 * (u.g & 1), u.lane);
    plain = pinned(shared_address(of.plain) + (u.g % ROWS * 4 + u.t) * 16, u.lane);
    zeros = pinned(ZEROS_AT + 8 * PARAMETER_BYTES * u.t, u.lane);
#pragma unroll
    for (int h = 0; h < HT; h++) {
      scale[h] = heads[h * 4 + u.t][0] * at.sm_scale / Q_TOP;
      plain_scale[h] = heads[h * 4 + u.t][1] * at.sm_scale / PLAIN_TOP;
    }
  }
  // This tile's digits and offsets.
  __device__ __forceinline__ void fold(u32 tile, const Unit& u) {
    if constexpr (K_SMALL) load_factors(tile);
    float widths[HT] = {};  // q times K's scales times their largest codes
    fold_column<0>(tile + PARAMETER_BYTES * half, tile + half, widths);
    add_zeros(tile + zeros, u);
    if constexpr (K_SMALL) subtract_half(widths, u);
  }
  __device__ __forceinline__ void load_factors(u32 tile) {
    u16 exponents;
    asm volatile("ld.shared.u16 %0,[%1];" : "=h"(exponents) : "r"(tile + EXPONENTS_AT));
    scale_factor = small_factor(exponents & 0xFF), zero_factor = small_factor(exponents >> 8);
  }
  // Zero-points of 8 channels as pairs of fp16.
  __device__ __forceinline__ void load_zeros(u32* b, u32 address) {
    if constexpr (!K_SMALL) return load4(b, address);
    u32 both[2];
    asm volatile("ld.shared.v2.u32 {%0,%1},[%2];" : "=r"(both[0]), "=r"(both[1]) : "r"(address));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 high = __byte_perm(both[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
      b[i] = (high & 0x80008000u) | (high & 0x7F007F00u) >> 2;
    }
  }
  // q times the zero-points: all columns of B are the same, and row g of the sums is q head g.
  __device__ __forceinline__ void add_zeros(u32 points, const Unit& u) {
    float sums[CHAINS][4];
#pragma unroll
    for (int n = 0; n < CHAINS; n++) sums[n][0] = sums[n][1] = sums[n][2] = sums[n][3] = 0.f;
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      u32 b[4];
      load_zeros(b, points + 32 * PARAMETER_BYTES * i);
#pragma unroll
      for (int n = 0; n < CHAINS; n++)
#pragma unroll
        for (int s = 0; s < 2; s++) {
          u32 a[4];
          load4(a, plain + (n * (D / 16) + 2 * i + s) * (ROWS * 64));
          mma_plain(sums[n], a, b + 2 * s);
        }
    }
#pragma unroll
    for (int h = 0; h < HT; h++) {
      const float* both = sums[4 * h / ROWS];
      const int from = (4 * h % ROWS + u.t) * 4;
      offset[h] = __shfl_sync(FULL, both[0] + both[2], from) * plain_scale[h];
      if constexpr (K_SMALL) offset[h] *= zero_factor;
    }
  }
  // Lowest levels lie half of their width below the middles, which are stored. widths: of a lane's
  // channels, q head g / 2 of four.
  __device__ __forceinline__ void subtract_half(float* widths, const Unit& u) {
#pragma unroll
    for (int h = 0; h < HT; h++) {
#pragma unroll
      for (int mask = 1; mask < 8; mask *= 2) widths[h] += __shfl_xor_sync(FULL, widths[h], mask);
      offset[h] = fmaf(-0.5f * scale[h], __shfl_sync(FULL, widths[h], 8 * u.t), offset[h]);
    }
  }
  // Scales of two channels.
  __device__ __forceinline__ void load_scales(float* s, u32 address) const {
    if constexpr (K_SMALL) {
      u16 both;
      asm volatile("ld.shared.u16 %0,[%1];" : "=h"(both) : "r"(address));
      unpack2(s, __byte_perm(both, 0, 0x4140) << 6);
      s[0] *= scale_factor, s[1] *= scale_factor;
    } else {
      u32 pair;
      asm volatile("ld.shared.u32 %0,[%1];" : "=r"(pair) : "r"(address));
      unpack2(s, pair);
    }
  }
  // A lane with an even g makes both digits of the first two of four channels, its neighbour those
  // of the other two: [high, high, low, low]. The two lanes then swap digits.
  template <int COLUMN>
  __device__ __forceinline__ void fold_column(u32 scales, u32 channels, float* widths) {
    // A bias whose lowest bit is worth 2^bit rounds q to what is left of it at that bit.
    constexpr float round = (BIAS + 128.f) * (1 << key_bit(COLUMN));
    u16 numbers;
    float s[2];
    load_scales(s, scales + SCALES_AT + 16 * PARAMETER_BYTES * COLUMN);
    asm volatile("ld.shared.u16 %0,[%1];"
                 : "=h"(numbers)
                 : "r"(channels + CHANNELS_AT + 16 * COLUMN));
    // Channels that a half column has twice count once.
    const float top = Keys::is_half(COLUMN) && half & 8 ? 0.f : (1 << Keys::bits(COLUMN)) - 1;
    u32 first, second;
    asm("prmt.b32 %0,%1,0,0x4440;" : "=r"(first) : "r"((u32)numbers));
    asm("prmt.b32 %0,%1,0,0x4441;" : "=r"(second) : "r"((u32)numbers));
    first = first * 16 + table, second = second * 16 + table;
#pragma unroll
    for (int h = 0; h < HT; h++) {
      float x, y;
      asm volatile("ld.shared.f32 %0,[%1];" : "=f"(x) : "r"(first + h * D * 16));
      asm volatile("ld.shared.f32 %0,[%1];" : "=f"(y) : "r"(second + h * D * 16));
      if constexpr (K_SMALL) widths[h] = fmaf(x, s[0] * top, fmaf(y, s[1] * top, widths[h]));
      const u32 own = __byte_perm(__float_as_uint(fmaf(x, s[0], round)),
                                  __float_as_uint(fmaf(y, s[1], round)), 0x4051) ^
                      0x80800000u;
      digits[h][COLUMN] = __byte_perm(own, __shfl_xor_sync(FULL, own, 4), pick);
    }
    if constexpr (COLUMN + 1 < Keys::COLUMNS) fold_column<COLUMN + 1>(scales, channels, widths);
  }
};
