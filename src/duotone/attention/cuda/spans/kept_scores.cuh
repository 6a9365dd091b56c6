// Scores of a unit, kept in shared memory between finding their range and using them.
//
// A score's integer product v has bounds: the sum over the channels where the folded q is negative,
// and the sum where it is positive. It is kept rounded to 16 bits of that width:
//
//     u = (v - lowest) * narrow,  [tile][h][lane][4 words],  word j: f[2 j] below f[2 j + 1]
//
// A lane that takes a tile's scores has the same keys and q heads as the lane that left them there.
#define CODE_TOP ((1 << KB) - 1)
#define SLACK (8.f * D * CODE_TOP)  // more than rounding q adds to a sum
#define KEPT_TOP 65535.f
#define KEPT_TILE_BYTES (HT * 512)

struct KeptScores {
  u32 memory;
  float narrow[HT], lift[HT];  // 2^23 + u = f * narrow + lift

  __device__ __forceinline__ void set(const Prologue& p, const Unit& u, const char* shared) {
    memory = pinned(shared_address(shared) + u.lane * 16, u.lane);
#pragma unroll
    for (int h = 0; h < HT; h++) {
      const float low = fmaf(p.sums[h * 4 + u.t][0], CODE_TOP * Q_TOP, -SLACK);
      const float high = fmaf(p.sums[h * 4 + u.t][1], CODE_TOP * Q_TOP, SLACK);
      narrow[h] = fminf(KEPT_TOP / (high - low), 1.f);
      lift[h] = fmaf(-(BIAS + low), narrow[h], P_BIAS);
    }
  }
  // Scores of a tile as words: what is kept, and what ranges are made of.
  __device__ __forceinline__ void keep(u32 (*words)[4], const float (*f)[8], int tile) const {
#pragma unroll
    for (int h = 0; h < HT; h++) {
#pragma unroll
      for (int j = 0; j < 4; j++)
        words[h][j] =
            __byte_perm(__float_as_uint(fmaf(f[h][2 * j], narrow[h], lift[h])),
                        __float_as_uint(fmaf(f[h][2 * j + 1], narrow[h], lift[h])), 0x5410);
      asm volatile(
          "st.shared.v4.u32 [%0],{%1,%2,%3,%4};" ::"r"(memory + tile * KEPT_TILE_BYTES + h * 512),
          "r"(words[h][0]), "r"(words[h][1]), "r"(words[h][2]), "r"(words[h][3])
          : "memory");
    }
  }
  // Scores of a tile as 2^23 + u.
  __device__ __forceinline__ void take(float (*f)[8], int tile) const {
#pragma unroll
    for (int h = 0; h < HT; h++) {
      u32 w[4];
      asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                   : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                   : "r"(memory + tile * KEPT_TILE_BYTES + h * 512)
                   : "memory");
#pragma unroll
      for (int j = 0; j < 4; j++) {
        f[h][2 * j] = __uint_as_float(__byte_perm(w[j], 0x4B000000, 0x7610));
        f[h][2 * j + 1] = __uint_as_float(__byte_perm(w[j], 0x4B000000, 0x7632));
      }
    }
  }
  // From now on scores are q.scale * u + q.offset. `lift` is rounded: lowest follows from it.
  __device__ __forceinline__ void change_units(Query& q) const {
#pragma unroll
    for (int h = 0; h < HT; h++) {
      const float lowest = (P_BIAS - lift[h]) / narrow[h] - BIAS;
      q.offset[h] = fmaf(lowest, q.scale[h], q.offset[h]);
      q.scale[h] /= narrow[h];
    }
  }
};

// Takes a tile's words into the range so far, those of the first `left` keys.
__device__ __forceinline__ void fold_words(u32* low, u32* high, const u32 (*words)[4], int left,
                                           int g) {
#pragma unroll
  for (int h = 0; h < HT; h++)
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      u32 a[2], b[2];  // for the smallest and for the largest
#pragma unroll
      for (int i = 0; i < 2; i++) {
        a[i] = b[i] = words[h][j + i];
        if (left < TILE) {  // a key that is not there changes nothing
          const int key = 16 * (j + i) + g;
          const u32 gone = (key < left ? 0u : 0xFFFFu) | (key + 8 < left ? 0u : 0xFFFF0000u);
          a[i] |= gone, b[i] &= ~gone;
        }
      }
      low[h] = __vimin3_u16x2(low[h], a[0], a[1]);
      high[h] = __vimax3_u16x2(high[h], b[0], b[1]);
    }
}

// Keeps all scores of a unit and finds their range (log2 units), to bounds[4 HT][2]; reads K only.
__device__ __forceinline__ void keep_scores(Ring& ring, const Unit& u, Query& q,
                                            const KeptScores& kept, float (*warps)[HEADS][2],
                                            float (*bounds)[2]) {
  u32 low[HT], high[HT];
#pragma unroll
  for (int h = 0; h < HT; h++) low[h] = FULL, high[h] = 0;
  while (ring.current < u.last) {
    int next;
    const u32 here = ring.take<TILES * K_BYTES, 0>(u, next);
    const int left = u.length - ring.current * KEYS, first = (ring.current - u.first) * TILES;
#pragma unroll
    for (int tile = 0; tile < TILES; tile++) {
      float f[HT][8];
      u32 words[HT][4];
      q.dot(f, here + tile * K_BYTES, u.lane);
      kept.keep(words, f, first + tile);
      fold_words(low, high, words, left - tile * TILE, u.g);
    }
    ring.advance(next);
  }
  ring.start<TILES * V_BYTES, TILES * K_BYTES>(u);  // V, while the range is agreed on
  kept.change_units(q);
  float lows[HT], highs[HT];
#pragma unroll
  for (int h = 0; h < HT; h++) {
    const u32 a = min(low[h] & 0xFFFF, low[h] >> 16), b = max(high[h] & 0xFFFF, high[h] >> 16);
    const bool any = a <= b;
    lows[h] = any ? fmaf((float)a, q.scale[h], q.offset[h]) : -MINUS_INFINITY;
    highs[h] = any ? fmaf((float)b, q.scale[h], q.offset[h]) : MINUS_INFINITY;
  }
  agree_in_block(u, lows, highs, warps, bounds);
}
