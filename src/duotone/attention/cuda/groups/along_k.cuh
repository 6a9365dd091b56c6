// K or V of a tile as the A operand where a scale belongs to a run of k (InnerQ). Codes enter
// products as they stand, and their sums are scaled: exact but for the rounding of fp32.
template <u32 BYTES>  // bytes of x; 8 more than a byte's number: its sign, eight times
__device__ __forceinline__ u32 take_bytes(u32 x) {
  u32 d;
  asm("prmt.b32 %0,%1,0,%2;" : "=r"(d) : "r"(x), "n"(BYTES));
  return d;
}
template <u32 MASK>  // x where MASK is set, y elsewhere
__device__ __forceinline__ u32 merge_bits(u32 x, u32 y) {
  u32 d;
  asm("lop3.b32 %0,%1,%2,%3,0xCA;" : "=r"(d) : "n"(MASK), "r"(x), "r"(y));
  return d;
}

// Scales and zero-points of rows g, g + 8 of two groups, and with signs the lowest bits of codes.
template <int SIGNS>
struct GroupPair {
  u32 scale[2], zero[2], low[2];

  // pair: [g]{2 scales, 2 zero-points or words 0}, with signs then [g]{2 words 1}.
  __device__ __forceinline__ void load(u32 pair, int g, int t) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                 : "=r"(scale[0]), "=r"(scale[1]), "=r"(zero[0]), "=r"(zero[1])
                 : "r"(pair + g * 16));
    if (SIGNS)
      asm volatile("ld.shared.v2.u32 {%0,%1},[%2];"
                   : "=r"(low[0]), "=r"(low[1])
                   : "r"(pair + (t < 2 ? g * 16 + 8 : 128 + g * 8)));
  }
  // All ones in the halves of rows that have signs.
  __device__ __forceinline__ u32 has_signs(int n) const { return take_bytes<0xBB99>(scale[n]); }
  // The lowest bits of this lane's numbers: 0 of rows that have a zero-point instead.
  __device__ __forceinline__ u32 low_bits(int n, int t) const {
    return take_bytes<0x3120>((low[n] & has_signs(n)) >> (t & 1));
  }
  // Values that numbers are counted from.
  template <int BITS>
  __device__ __forceinline__ u32 start(int n) const {
    if (!SIGNS) return zero[n];
    const u32 middle = mul2(scale[n], TWO_TO(BITS - 1) ^ 0x80008000u);
    return (middle & has_signs(n)) | (zero[n] & ~has_signs(n));
  }
};

// One operand: ROWS tiles of 16 rows by CHUNKS of 16 k.
template <int ROWS, int CHUNKS, int BITS, int GROUP, int SIGNS>
struct AlongK {
  static constexpr int WORDS = ROWS * CHUNKS * BITS / 4;
  static constexpr int GROUPS = GROUP >= CHUNKS * 16 ? 1 : CHUNKS * 16 / GROUP;  // per row
  static constexpr int RUNS = CHUNKS / 2 / GROUPS;  // of 32 k per group
  static constexpr int PAIR_BYTES = SIGNS ? 192 : 128;
  // Value of an fp16 subnormal's last bit, as long as B is divided.
  static constexpr float UNIT = 16777216.f / (1 << SIGNS);
  u32 words[WORDS];

  // The bit at which a number with this q stands.
  static __device__ __forceinline__ constexpr int bit_of(int q) {
    return BITS == 4 ? 4 * (q & 1) : 2 * q;
  }
  // B of a chunk and half, divided by what its q multiplies.
  static __device__ __forceinline__ u32 divided(u32 b, int chunk, int half) {
    return bit_of(2 * (chunk & 1) + half) ? mul2(b, TWO_TO(-bit_of(2 * (chunk & 1) + half))) : b;
  }
  __device__ __forceinline__ void load(u32 codes, int lane) {
    load_words<WORDS>(words, codes, lane);
  }
  // Sums of B over the groups of k: what rows of ones would give.
  static __device__ __forceinline__ void sum(float2 (*ones)[HT], const u32 (*b)[HT][2]) {
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int group = 0; group < GROUPS; group++) {
        float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int chunk = 0; chunk < 2 * RUNS; chunk++) {
          u32 a[4];
#pragma unroll
          for (int i = 0; i < 4; i++)
            a[i] = 0x00010001u << (SIGNS + bit_of(2 * (chunk & 1) + (i >> 1)));
          mma(c, a, b[group * 2 * RUNS + chunk][h]);
        }
        ones[group][h] = make_float2(c[0], c[1]);
      }
  }
  // c[row tile][h] += A * b[chunk][h]; sums: what `sum` gave.
  template <class Sums>
  __device__ __forceinline__ void multiply(float (*c)[HT][4], const u32 (*b)[HT][2],
                                           const Sums& sums, u32 params, int g, int t) const {
#pragma unroll
    for (int n = 0; n < ROWS * GROUPS; n += 2) {
      GroupPair<SIGNS> pair;
      pair.load(params + n / 2 * PAIR_BYTES, g, t);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int group = (n + j) % GROUPS;
        float (*mine)[4] = c[(n + j) / GROUPS];
        sums.add(mine, group, pair.template start<BITS>(j));
        add(mine, b + group * 2 * RUNS, (n + j) * RUNS, pair, j, t);
      }
    }
  }
  // c[h] += scale * A * b[chunk][h] over a group.
  __device__ __forceinline__ void add(float (*c)[4], const u32 (*b)[HT][2], int run,
                                      const GroupPair<SIGNS>& pair, int j, int t) const {
    float sums[HT][4];
#pragma unroll
    for (int r = 0; r < RUNS; r++) {
      u32 a[2][4];
      if (SIGNS)
        signed_numbers(a, run + r, pair.low_bits(j, t));
      else
        plain_numbers(a, run + r);
#pragma unroll
      for (int chunk = 0; chunk < 2; chunk++)
#pragma unroll
        for (int h = 0; h < HT; h++)
          if (r + chunk == 0)
            mma_anew(sums[h], a[chunk], b[0][h]);
          else
            mma(sums[h], a[chunk], b[2 * r + chunk][h]);
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int h = 0; h < HT; h++)
        c[h][i] = fmaf(half_to_float(pair.scale[j] >> (i >> 1) * 16), sums[h][i], c[h][i]);
  }
  // A of the two chunks of a run: codes where they stand.
  __device__ __forceinline__ void plain_numbers(u32 (*a)[4], int run) const {
    constexpr u32 MASK = ((1u << BITS) - 1) * 0x00010001u;
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const u32 word = BITS == 4   ? words[2 * run + i] >> (q >> 1) * 8
                         : BITS == 2 ? words[run] >> i * 8
                                     : words[run / 2] >> (i * 8 + run % 2);
        a[q >> 1][(q & 1) * 2 + i] = word & MASK << bit_of(q);
      }
  }
  // A with a lowest bit below each code.
  __device__ __forceinline__ void signed_numbers(u32 (*a)[4], int run, u32 low) const {
    constexpr u32 MASK = ((2u << BITS) - 1) * 0x00010001u;
    if constexpr (BITS == 4) {
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int q = 0; q < 4; q++) {
          const u32 here = words[2 * run + i], word = q >> 1 ? take_bytes<0x0321>(here) : here;
          const u32 below = low >> (i * 8 + (q >> 1) * 2);
          const u32 both =
              q & 1 ? merge_bits<0x01E001E0u>(word, below) : merge_bits<0x001E001Eu>(word, below);
          a[q >> 1][(q & 1) * 2 + i] = both & MASK << bit_of(q);
        }
    } else {
      u32 both[2][2];  // [row half][parity of q]
      if (BITS == 2) {
        both[0][0] = merge_bits<0x66666666u>(words[run], low);
        both[0][1] = merge_bits<0x99999999u>(words[run], low);
      } else {
        const u32 word = words[run / 2];
        both[0][0] = both[0][1] =
            merge_bits<0xAAAAAAAAu>(run % 2 ? __funnelshift_r(word, word, 1) : word, low);
      }
#pragma unroll
      for (int parity = 0; parity < 2; parity++)
        both[1][parity] = take_bytes<0x0321>(both[0][parity]);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int q = 0; q < 4; q++) a[q >> 1][(q & 1) * 2 + i] = both[i][q & 1] & MASK << bit_of(q);
    }
  }
};
