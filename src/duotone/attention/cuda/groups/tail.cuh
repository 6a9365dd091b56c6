// Tokens of a sequence after its packed ones, as A operands: 16-bit rows in pages of the same pool.
//
// A sequence has TAIL_PAGES pages for them, in turn: token t is in row t % (TAIL_PAGES *
// TAIL_ROWS). Of each head a page has TAIL_ROWS rows of K, then as many of V. Numbers enter as
// fp16, which holds bf16 from 2^-14 to 65504 exactly. Rows come straight into registers: there are
// few of them.
//
// Expects TAIL, the type of rows: 1 for fp16, 2 for bf16; and sums.cuh.
#define TAIL_TOKENS 16  // that a warp takes at a time
#define TAIL_ROW_BYTES (CHANNELS * 2)
#define TAIL_ROWS (PACKED_TILE_BYTES / (2 * TAIL_ROW_BYTES))
static_assert(PAGED == 1 && CHANNELS == D, "a page is one packed tile, and holds whole rows");
static_assert(!K_ALONG_K && !V_ALONG_K, "q and weights enter undivided");

struct Tail {
  const char* pool;  // of this kv head
  const int* pages;  // of this sequence
  size_t page_bytes;
  int first, tokens;

  __device__ __forceinline__ void find(const Arguments& at, const Unit& u) {
    pool = u.source, page_bytes = u.page_bytes;
    pages = at.tail_pages + u.sequence * TAIL_PAGES;
    first = u.length, tokens = (int)at.tail_tokens[u.sequence];
  }
  // K of a token.
  __device__ __forceinline__ const char* row(int token) const {
    const u32 slot = (u32)(first + token) % (TAIL_PAGES * TAIL_ROWS);
    return pool + pages[slot / TAIL_ROWS] * page_bytes + slot % TAIL_ROWS * TAIL_ROW_BYTES;
  }
  // Two numbers, or zeros: what a weight of 0 meets must be a number.
  static __device__ __forceinline__ u32 load(const char* at, bool there) {
    const u32 x = there ? *(const u32*)at : 0;
    return TAIL == 1 ? x : pack2(__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u));
  }
  // Adds a warp's share of the tokens.
  template <class Query, class Sums>
  __device__ __forceinline__ void add(Sums& sums, const Query& q, const Unit& u) const {
    for (int from = TAIL_TOKENS * u.warp; from < tokens; from += TAIL_TOKENS * WARPS)
      add_tokens(sums, q, u, from);
  }
  template <class Query, class Sums>
  __device__ __forceinline__ void add_tokens(Sums& sums, const Query& q, const Unit& u,
                                             int from) const {
    const char* rows[2];  // of tokens g and g + 8
    bool there[2];
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const int token = from + 8 * n + u.g;
      there[n] = token < tokens, rows[n] = row(min(token, tokens - 1)) + 4 * u.t;
    }
    float s[2][HT][4];  // the upper 16 of 32 tokens are none
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int i = 0; i < 4; i++) s[0][h][i] = 0.f, s[1][h][i] = MINUS_INFINITY;
#pragma unroll
    for (int chunk = 0; chunk < KC; chunk++) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        a[i] = load(rows[i & 1] + 32 * chunk + 16 * (i >> 1), there[i & 1]);
#pragma unroll
      for (int h = 0; h < HT; h++) mma(s[0][h], a, q.b[chunk][h]);
    }
#pragma unroll
    for (int h = 0; h < HT; h++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        s[0][h][i] = there[i >> 1] ? s[0][h][i] * (q.scale[h][i & 1] / Keys::UNIT) : MINUS_INFINITY;
    sums.weigh(s);
    add_values(sums, s[0], rows, there);
  }
  // Weights, and not V, are in units of `Values`: it may use all of fp16.
  template <class Sums>
  static __device__ __forceinline__ void add_values(Sums& sums, const float (*s)[4],
                                                    const char* const* rows, const bool* there) {
    constexpr float UNIT = 1.f / Values::UNIT;
    const u32 ones[4] = {TWO_TO(0), TWO_TO(0), TWO_TO(0), TWO_TO(0)};
    u32 p[HT][2];
#pragma unroll
    for (int h = 0; h < HT; h++) {
      float weights[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
      for (int half = 0; half < 2; half++)
        p[h][half] = transpose8x8(pack2(s[h][2 * half] * UNIT, s[h][2 * half + 1] * UNIT));
      mma(weights, ones, p[h]);
      sums.weight[h][0] += weights[0], sums.weight[h][1] += weights[1];
    }
#pragma unroll
    for (int m = 0; m < KC; m++) {
      u32 a[4];
#pragma unroll
      for (int i = 0; i < 4; i++)
        a[i] = transpose8x8(
            load(rows[i >> 1] + TAIL_ROWS * TAIL_ROW_BYTES + 32 * m + 16 * (i & 1), there[i >> 1]));
#pragma unroll
      for (int h = 0; h < HT; h++) mma(sums.acc[m][h], a, p[h]);
    }
  }
};
