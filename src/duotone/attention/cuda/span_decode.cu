// Decode attention on packed K and V whose scales belong to whole spans of tokens.
//
// Compiled by NVRTC with these macros:
//   CHANNELS  channels of K and V; D: padded to a multiple of 32 in the codes
//   KB, VB  bits per code of K and of V (1, 2, 4, 8)
//   G       q heads per kv head
//   WARPS, TEAMS, STAGES, TILES
//   QUERY   type of q and of out: 0 float16, 1 bfloat16, 2 float32
//   TAU     1: score calibration; all teams of a kv head must be resident together
//   ARGUMENTS_BYTES  what the host takes Arguments to be
#define D ((CHANNELS + 31) / 32 * 32)
#define HT ((G + 3) / 4)      // tiles of 4 q heads: 8 columns of B, a high and a low digit each
#define MT (D / 16)           // tiles of 16 channels of V
#define KPB (8 / KB)          // codes per byte
#define VPB (8 / VB)
#define KREGS (D / 16)       // registers of A per row of K
#define KWORDS (D * KB / 16) // words per lane and tile of 64 keys
#define VWORDS (D * VB / 16)
#define TILE 64
#define KEYS (TILES * TILE)
#define K_BYTES (KWORDS * 128)
#define V_BYTES (VWORDS * 128)
#define RECORD_BYTES (TILES * (K_BYTES + V_BYTES))
// Where positions inside a byte differ between the rows of a tile, codes are shifted down instead.
#define K_ALIGNED (KREGS % 4 == 0 || KB != 1)
#define V_ALIGNED (2 * MT % VPB == 0)
#define V_RAW (MT % VPB == 0 && VB < 8) // the last code of a byte comes from the unmasked word
#define V_SIGNED (V_RAW && VB == 1)     // and the one before it from the same word as signed bytes
#define SMALL_DOTS (KB == 1 && D <= 128) // Q_TOP * D < 2^22: both digits fit one biased integer
// How far a code of register r stands above the lowest bits of its byte; q makes up for it.
#define K_PLACE(r) (K_ALIGNED && KB < 4 ? ((r) * KB) & 3 : 0)
#define Q_SHIFT (K_ALIGNED ? (KB == 1 ? 3 : KB == 2 ? 2 : 0) : 0)

#define BIAS 12582912.f // 1.5 * 2^23: an integer below 2^22 added to its bits is a float
#define BIAS_BITS 0x4B400000
#define P_BIAS 8388608.f // 2^23: a float below 2^16 added to it has its integer in the low bits
#define Q_TOP 32639.f // 127 * 256 + 127
#define P_TOP 15.999f
#define MIN_SLOPE 1e-3f // as in quant.calibration
#define MIN_WIDTH 1e-20f
#define LIFT 3.f // how far below 2^16 a new maximum enters
#define HEADS (HT * 4)
#include "common.cuh"

__device__ __forceinline__ void mma_k(int* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_k_first(int* c, const u32* a, const u32* b, const int* bias) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%10,%11,%12,%13};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(bias[0]), "r"(bias[1]), "r"(bias[2]), "r"(bias[3]));
}
__device__ __forceinline__ void mma_v_signed(int* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_v(int* c, const u32* a, const u32* b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},"
      "{%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// A register of K: row half `half` of 16 keys `sub`, register r of the row.
template <int E> __device__ __forceinline__ u32 k_register(const u32* words) {
  const int word = E / KPB, at = E % KPB * KB;
  const u32 mask = ((1u << KB) - 1) * 0x01010101u;
  if (KB == 8) return words[word];
  if (!K_ALIGNED) return (words[word] >> at) & mask;
  return (words[word] >> (at & 4)) & (mask << (at & 3));
}
// A register of V: keys half u, register a, channels tile m.
template <int E> __device__ __forceinline__ u32 v_register(const u32* words) {
  const int word = E / VPB, at = E % VPB * VB;
  const u32 mask = ((1u << VB) - 1) * 0x01010101u;
  if (VB == 8) return words[word];
  if (!V_ALIGNED) return (words[word] >> at) & mask;
  if ((V_RAW && at == 8 - VB) || (V_SIGNED && at == 6)) return words[word];
  return words[word] & (mask << at);
}

template <int SUB, int M> struct KDot {
  static __device__ __forceinline__ void run(int (*c)[4], const u32* words, const u32 (*q)[KREGS], const int* bias) {
    u32 a[4] = {k_register<(SUB * 2) * KREGS + 2 * M>(words), k_register<(SUB * 2 + 1) * KREGS + 2 * M>(words),
                k_register<(SUB * 2) * KREGS + 2 * M + 1>(words), k_register<(SUB * 2 + 1) * KREGS + 2 * M + 1>(words)};
#pragma unroll
    for (int h = 0; h < HT; h++) {
      if (M == 0) mma_k_first(c[h], a, q[h] + 2 * M, bias);
      else mma_k(c[h], a, q[h] + 2 * M);
    }
    if constexpr (2 * M + 2 < KREGS) KDot<SUB, M + 1>::run(c, words, q, bias);
  }
};
template <int U, int M> struct VDot {
  static __device__ __forceinline__ void run(int (*acc)[MT][4], const u32* words, const u32 (*p)[2][2]) {
    u32 a[4] = {v_register<(U * 4 + 0) * MT + M>(words), v_register<(U * 4 + 1) * MT + M>(words),
                v_register<(U * 4 + 2) * MT + M>(words), v_register<(U * 4 + 3) * MT + M>(words)};
#pragma unroll
    for (int h = 0; h < HT; h++) {
      if (V_SIGNED && M % 8 == 6) mma_v_signed(acc[h][M], a, p[h][U]);
      else mma_v(acc[h][M], a, p[h][U]);
    }
    if constexpr (M + 1 < MT) VDot<U, M + 1>::run(acc, words, p);
  }
};

__device__ __forceinline__ void shift_digits(int* c, int by) { // the high digit's remainder moves on
  const int mask = by < 16 ? (1 << by) - 1 : 0;
  c[1] = (c[1] + ((c[0] & mask) << 8)) >> by;
  c[0] >>= by;
  c[3] = (c[3] + ((c[2] & mask) << 8)) >> by;
  c[2] >>= by;
}
__device__ __forceinline__ float channel_weight(int row_half, int m) { // undoes the place of a code
  const int at = ((row_half * MT + m) % VPB) * VB;
  return (!V_ALIGNED || VB == 8) ? 1.f : 1.f / (float)(1 << at);
}

struct Arguments : Call {
  const u16* k_scale; // fp16, [batch * kv_heads * blocks, CHANNELS]
  const u16* k_zero;
  const u16* v_scale;
  const u16* v_zero;
  float* ranges;    // [batch * kv_heads, blocks * splits, G, 2]: scores' ranges, with TAU
  float tau1, tau2; // times log2(e)
};
static_assert(sizeof(Arguments) == ARGUMENTS_BYTES, "the host's structure differs");

// What a team needs before its first key and after its last one.
struct __align__(16) Prologue {
  int query[HEADS][D]; // integers in the low bits, above BIAS_BITS
  int bias[4], ones[4];
  float heads[HEADS][2], v_scale[D], v_zero[D];
};

// q with K's scales folded in, as integers of two digits in the order of B, and what undoes it.
struct Query {
  u32 digits[HT][KREGS];
  int bias[4];                 // of the digits' sums
  float scale[HT], offset[HT]; // score * log2(e) = scale * (integer product) + offset

  __device__ __forceinline__ void fold(const Arguments& at, const Unit& u, Prologue& p) {
    wait_for_previous();
    const query_t* query = at.query + (size_t)u.head * G * CHANNELS;
    const size_t row = (size_t)u.row * CHANNELS;
    for (int h = u.warp; h < HEADS; h += WT) {
      float top = 0.f, sum = 0.f, folded[D / 32];
#pragma unroll
      for (int i = 0; i < D / 32; i++) {
        const int c = i * 32 + u.lane;
        const bool real = h < G && c < CHANNELS;
        const float x = real ? query_to_float(query[h * CHANNELS + c]) : 0.f;
        folded[i] = real ? x * half_to_float(at.k_scale[row + c]) : 0.f;
        if (real) sum = fmaf(x, half_to_float(at.k_zero[row + c]), sum);
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
        p.query[h][c] = __float_as_int(fmaf(folded[i], inverse * (float)(1 << (Q_SHIFT - K_PLACE(r))), BIAS));
      }
      if (u.lane == 0) p.heads[h][0] = top, p.heads[h][1] = sum * at.sm_scale;
    }
    if (u.tid < 4) p.bias[u.tid] = SMALL_DOTS && !(u.tid & 1) ? 0 : BIAS_BITS, p.ones[u.tid] = 0x01010101;
    for (int c = u.tid; c < CHANNELS; c += WT * 32) {
      p.v_scale[c] = half_to_float(at.v_scale[row + c]);
      p.v_zero[c] = half_to_float(at.v_zero[row + c]);
    }
    TEAM_SYNC(u);
    // Loaded, so that the compiler keeps them instead of making them anew for every product.
    asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(bias[0]), "=r"(bias[1]), "=r"(bias[2]), "=r"(bias[3])
                 : "r"(shared_address(p.bias)));
    // Column g of B is the high (even g) or the low digit of q head g / 2.
    const int round = u.g & 1 ? 0 : 128;
    const u32 pick = u.g & 1 ? 0x0040 : 0x0051;
#pragma unroll
    for (int h = 0; h < HT; h++) {
#pragma unroll
      for (int r = 0; r < KREGS; r++) {
        const int4 x = *(const int4*)&p.query[h * 4 + (u.g >> 1)][16 * r + 4 * u.t];
        digits[h][r] = __byte_perm(__byte_perm(x.x + round, x.y + round, pick), __byte_perm(x.z + round, x.w + round, pick), 0x5410);
      }
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
        f[h][x] = SMALL_DOTS ? __int_as_float(c[0] * 256 + c[1]) : fmaf(__int_as_float(c[0]) - BIAS, 256.f, __int_as_float(c[1]));
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

// Where biased products are positive, they order as their bits do: three at a time.
__device__ __forceinline__ float lowest(float a, float b, float c) {
  if (SMALL_DOTS) return __int_as_float(__vimin3_s32(__float_as_int(a), __float_as_int(b), __float_as_int(c)));
  return fminf(a, fminf(b, c));
}
__device__ __forceinline__ float highest(float a, float b, float c) {
  if (SMALL_DOTS) return __int_as_float(__vimax3_s32(__float_as_int(a), __float_as_int(b), __float_as_int(c)));
  return fmaxf(a, fmaxf(b, c));
}

// Takes 64 biased products into the range so far, those of the first `left` keys.
__device__ __forceinline__ void fold_range(float* low, float* high, const float (*f)[8], int left, int g) {
#pragma unroll
  for (int h = 0; h < HT; h++)
#pragma unroll
    for (int x = 0; x < 8; x += 2) {
      float a = f[h][x], b = f[h][x + 1];
      if (left < TILE) { // a key that is not there changes nothing
        const bool first = 8 * x + g < left, second = 8 * x + 8 + g < left;
        low[h] = lowest(low[h], first ? a : low[h], second ? b : low[h]);
        high[h] = highest(high[h], first ? a : high[h], second ? b : high[h]);
      } else low[h] = lowest(low[h], a, b), high[h] = highest(high[h], a, b);
    }
}

// Smallest and largest score (log2 units) of each q head in a unit, to bounds[4 HT][2]; reads K only.
__device__ __forceinline__ void score_range(Ring& ring, const Unit& u, const Query& q, float (*warps)[HEADS][2], float (*bounds)[2]) {
  float low[HT], high[HT];
#pragma unroll
  for (int h = 0; h < HT; h++) low[h] = -MINUS_INFINITY, high[h] = SMALL_DOTS ? 0.f : MINUS_INFINITY;
  while (ring.current < u.last) {
    int next;
    const u32 here = ring.take<TILES * K_BYTES>(u, next);
    const int left = u.length - ring.current * KEYS;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      float f[HT][8];
      q.dot(f, here + tile * K_BYTES, u.lane);
      fold_range(low, high, f, left - tile * TILE, u.g);
    }
    ring.current = __shfl_sync(FULL, next, 0);
  }
  ring.start<RECORD_BYTES>(u); // the next pass, while the range is agreed on
#pragma unroll
  for (int h = 0; h < HT; h++) {
#pragma unroll
    for (int o = 4; o < 32; o <<= 1) {
      low[h] = fminf(low[h], __shfl_xor_sync(FULL, low[h], o));
      high[h] = fmaxf(high[h], __shfl_xor_sync(FULL, high[h], o));
    }
    if (u.g == 0) {
      const bool any = low[h] < -MINUS_INFINITY;
      float* mine = warps[u.team * WT + u.warp][h * 4 + u.t];
      mine[0] = any ? fmaf(low[h] - BIAS, q.scale[h], q.offset[h]) : -MINUS_INFINITY;
      mine[1] = any ? fmaf(high[h] - BIAS, q.scale[h], q.offset[h]) : MINUS_INFINITY;
    }
  }
  TEAM_SYNC(u);
  if (u.tid < HEADS) {
    float a = -MINUS_INFINITY, b = MINUS_INFINITY;
    for (int w = 0; w < WT; w++) a = fminf(a, warps[u.team * WT + w][u.tid][0]), b = fmaxf(b, warps[u.team * WT + w][u.tid][1]);
    bounds[u.tid][0] = a, bounds[u.tid][1] = b;
  }
}

// The range over all parts of a kv head; every team of the head must be resident.
__device__ __forceinline__ void agree_on_range(const Arguments& at, const Unit& u, float (*bounds)[2]) {
  const int parts = at.blocks * at.splits;
  float* shared_ranges = at.ranges + (size_t)u.head * parts * G * 2;
  if (u.tid < G) __stcg((float2*)shared_ranges + u.part * G + u.tid, make_float2(bounds[u.tid][0], bounds[u.tid][1]));
  __threadfence();
  TEAM_SYNC(u);
  if (u.tid == 0) {
    atomicAdd(at.counters + 2 * u.head + 1, 1);
    while (*(volatile int*)(at.counters + 2 * u.head + 1) < parts) {
    }
  }
  TEAM_SYNC(u);
  __threadfence();
  if (u.tid < G)
    for (int s = 0; s < parts; s++) {
      const float2 other = __ldcg((const float2*)shared_ranges + s * G + u.tid);
      bounds[u.tid][0] = fminf(bounds[u.tid][0], other.x), bounds[u.tid][1] = fmaxf(bounds[u.tid][1], other.y);
    }
}

// Score calibration (CalibQuant eq. 7-8): scores become slope * score + offset.
__device__ __forceinline__ void calibrate(const Arguments& at, const Unit& u, Query& q, const float (*bounds)[2]) {
#pragma unroll
  for (int h = 0; h < HT; h++) {
    const float low = bounds[h * 4 + u.t][0], high = bounds[h * 4 + u.t][1], width = high - low;
    const float slope = width > MIN_WIDTH ? fmaxf(1.f + (at.tau1 - at.tau2) / width, MIN_SLOPE) : 1.f;
    q.scale[h] *= slope;
    q.offset[h] = q.offset[h] * slope + (high - at.tau2 - slope * high);
  }
}

// softmax(q K^T) V of a unit: integer sums of p * code, p in 16 bits under a running maximum.
struct Sums {
  int acc[HT][MT][4], total[HT][4];
  float top[HT], shift[HT];
  u32 p[HT][2][2], ones[4];

  __device__ __forceinline__ void clear(const Prologue& prologue) {
    asm volatile("ld.volatile.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(ones[0]), "=r"(ones[1]), "=r"(ones[2]), "=r"(ones[3])
                 : "r"(shared_address(prologue.ones)));
#pragma unroll
    for (int h = 0; h < HT; h++) {
#pragma unroll
      for (int m = 0; m < MT; m++) acc[h][m][0] = acc[h][m][1] = acc[h][m][2] = acc[h][m][3] = 0;
      total[h][0] = total[h][1] = total[h][2] = total[h][3] = 0;
      p[h][0][0] = p[h][0][1] = p[h][1][0] = p[h][1][1] = 0;
      top[h] = -1e30f, shift[h] = 1e30f;
    }
  }
  __device__ __forceinline__ void add(const u32* v) {
#pragma unroll
    for (int h = 0; h < HT; h++) mma_v(total[h], ones, p[h][0]), mma_v(total[h], ones, p[h][1]);
    VDot<0, 0>::run(acc, v, p);
    VDot<1, 0>::run(acc, v, p);
  }
  __device__ __forceinline__ u32 exponentials(const float (*f)[8], const Query& q, u32 (*pi)[8], int h) const {
    u32 over = 0;
#pragma unroll
    for (int x = 0; x < 8; x++) {
      pi[h][x] = __float_as_uint(exp2_fast(fmaf(f[h][x], q.scale[h], shift[h])) + P_BIAS);
      over |= pi[h][x];
    }
    return over;
  }
  // Some p needs more than 16 bits: raise the maxima and shift what was summed so far.
  __device__ __forceinline__ void raise(const float (*f)[8], const Query& q, u32 (*pi)[8]) {
#pragma unroll
    for (int h = 0; h < HT; h++) {
      float a = f[h][0];
#pragma unroll
      for (int x = 1; x < 8; x++) a = fmaxf(a, f[h][x]);
#pragma unroll
      for (int o = 4; o < 32; o <<= 1) a = fmaxf(a, __shfl_xor_sync(FULL, a, o));
      const float score = fmaf(a - BIAS, q.scale[h], q.offset[h]);
      const float raised = score > top[h] - 1.f ? floorf(score) + LIFT : top[h];
      const int by = (int)fminf(raised - top[h], 31.f);
      top[h] = raised;
      shift[h] = fmaf(-BIAS, q.scale[h], q.offset[h] + P_TOP - raised);
#pragma unroll
      for (int m = 0; m < MT; m++) shift_digits(acc[h][m], by);
      shift_digits(total[h], by);
      exponentials(f, q, pi, h);
    }
  }
  __device__ __forceinline__ void to_operand(const u32 (*pi)[8]) {
#pragma unroll
    for (int h = 0; h < HT; h++)
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
          if (V_SIGNED) { // unsigned minus signed bytes: 256 times the top bit, which stands for 128
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
      if (u.g == 0) ml[h * 4 + u.t][0] = top[h], ml[h * 4 + u.t][1] = (float)total[h][0] * 256.f + (float)total[h][1];
    }
  }
};

extern "C" __global__ void __launch_bounds__(WARPS * 32, 1) span_decode(const __grid_constant__ Arguments at) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ Prologue prologue[TEAMS];
  __shared__ float ml[WARPS][HEADS][2];
  __shared__ int flags[TEAMS], drawn[TEAMS];
  __shared__ __align__(8) u64 barriers[WARPS * STAGES];
  let_next_begin();
  Unit u;
  if (!find_unit(at, u)) return;
  Ring ring;
  ring.make(u, shared, barriers, drawn + u.team);
  Query q;
#if TAU
  ring.start<TILES * K_BYTES>(u);
  ring.reset(u);
  q.fold(at, u, prologue[u.team]);
  score_range(ring, u, q, ml, prologue[u.team].heads);
  if (at.blocks * at.splits > 1) agree_on_range(at, u, prologue[u.team].heads);
  ring.reset(u);
  TEAM_SYNC(u);
  calibrate(at, u, q, prologue[u.team].heads);
#else
  ring.start<RECORD_BYTES>(u);
  ring.reset(u);
  q.fold(at, u, prologue[u.team]);
#endif
  Sums sums;
  sums.clear(prologue[u.team]);
  // V of the tile before: its probabilities arrive while this tile's scores are computed.
  u32 before = ring.memory + TILES * K_BYTES;
  bool any = false;
  while (ring.current < u.last) {
    int next;
    const u32 here = ring.take<RECORD_BYTES>(u, next);
    const int left = u.length - ring.current * KEYS;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      float f[HT][8];
      u32 pi[HT][8], v[VWORDS], over = 0;
      load_words<VWORDS>(v, before, u.lane);
      q.dot(f, here + tile * K_BYTES, u.lane);
      before = here + TILES * K_BYTES + tile * V_BYTES;
      if (left < KEYS) hide_behind(f, left - tile * TILE, u.g, MINUS_INFINITY);
#pragma unroll
      for (int h = 0; h < HT; h++) over |= sums.exponentials(f, q, pi, h);
      sums.add(v); // nothing yet in the first tile: p is 0
      if (__any_sync(FULL, (over & ~0x4B00FFFFu) != 0)) sums.raise(f, q, pi);
      sums.to_operand(pi);
    }
    any = true;
    ring.current = __shfl_sync(FULL, next, 0);
  }
  if (any) {
    u32 v[VWORDS];
    load_words<VWORDS>(v, before, u.lane);
    sums.add(v);
    sums.separate();
  }

  asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); // the ring is free now
  sums.store(u, sums_of(u, shared, u.warp), ml[u.team * WT + u.warp]);
  const Prologue& p = prologue[u.team];
  finish(at, u, shared, ml, prologue[u.team].heads, flags + u.team, P_TOP, [&](int c, float l, float sum) { return sum * p.v_scale[c] + l * p.v_zero[c]; });
}
