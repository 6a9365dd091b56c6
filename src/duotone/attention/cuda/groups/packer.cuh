// A warp, or several that share the steps, packs K or V of 32 tokens: a matrix of rows by k
// (groups/layout.py).
//
// It goes through the tile in steps. Along rows, a step is a row group by a chunk of 16 k. A lane
// sees 4 groups: k, k + 1, k + 8, k + 9. Along k, a step is a row tile by a group, and a lane sees
// rows g and g + 8.
enum { ASYMMETRIC, SYMMETRIC, HYBRID, SYMMETRIC_HYBRID };

// Work of a packing warp: its tile, room for words, its part of the steps, where results go.
struct Job {
  u32 tile, words;
  int lane, g, t, warp, part;
  char *codes, *params;     // codes: null where they are not stored
  const char* norm;         // of this head, or null
  float shrink, eta, rest;  // rest: 1 - 2 eta
  bool there;               // false: no tile, only barriers
};

// Scales, zero-points and lowest bits of rows g and g + 8 of a group along k. low: word t / 2.
struct RowPair {
  u32 scale, zero, low;

  // Word 0: lowest bits where there is no zero-point.
  __device__ __forceinline__ u32 word() const { return low | zero; }
};

template <int VALUE, int BITS, int ALONG_K, int GROUP, int MAPPING>
struct Packer {
  static constexpr int ROWS = VALUE ? D / 16 : 2, CHUNKS = VALUE ? 2 : D / 16;
  static constexpr int WORDS = D * BITS / 32;  // of a lane
  // Row tiles and chunks of a step, and groups that a lane sees.
  static constexpr int HIGH = ALONG_K ? 1 : GROUP / 16 < ROWS ? GROUP / 16 : ROWS;
  static constexpr int WIDE = !ALONG_K ? 1 : GROUP / 16 < CHUNKS ? GROUP / 16 : CHUNKS;
  static constexpr int GROUPS = ALONG_K ? 2 : 4, FRAGMENTS = HIGH * WIDE;
  static constexpr int STEPS = ROWS * CHUNKS / FRAGMENTS, STEPS_PER_ROW = CHUNKS / WIDE;
  // Warps that share groups along tokens.
  static constexpr int PARTNERS = VALUE == ALONG_K ? GROUP / TILE : 1;
  static constexpr int OWN_STEPS = STEPS / SHARERS, OWN_WORDS = WORDS / SHARERS;
  // Two steps fill the same words. Along rows these are not a part of all words.
  static_assert(SHARERS == 1 || OWN_STEPS % 2 == 0, "pairs of steps");
  static constexpr bool AGREE = SHARERS > 1 && !ALONG_K;
  static_assert(!AGREE || (SHARERS == WARPS && BITS > 1), "a block has one tile");
  static_assert(PARTNERS <= WARPS && WARPS % PARTNERS == 0, "a block holds whole groups");
  static_assert(MAPPING == ASYMMETRIC || (ALONG_K && GROUP == 32), "signs need inner groups");

  // The group of element `half` of register i.
  static __device__ __forceinline__ constexpr int group_of(int i, int half) {
    return ALONG_K ? i % 2 : i / 2 * 2 + half;
  }
  static __device__ __forceinline__ int row_tile(int step, int f) {
    return step / STEPS_PER_ROW * HIGH + f / WIDE;
  }
  static __device__ __forceinline__ int chunk(int step, int f) {
    return step % STEPS_PER_ROW * WIDE + f % WIDE;
  }
  // The channel of a lane's group, where groups run along tokens.
  static __device__ __forceinline__ int channel(const Job& job, int step, int group) {
    return ALONG_K ? 16 * row_tile(step, 0) + job.g + 8 * group
                   : 16 * chunk(step, 0) + 2 * job.t + 8 * (group / 2) + group % 2;
  }

  static __device__ __forceinline__ void load(Pair (*x)[4], const Job& job, int step) {
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
      load_fragment<VALUE>(x[f], job.tile, row_tile(step, f), chunk(step, f), job.lane);
#if NORM
      if (!VALUE) normalize(x[f], job, chunk(step, f));
#endif
    }
  }
#if NORM
  static __device__ __forceinline__ void normalize(Pair* x, const Job& job, int chunk) {
#pragma unroll
    for (int n = 0; n < 2; n++) {
      float norm[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int k = 16 * chunk + 2 * job.t + 8 * n + half;
        norm[half] = k < CHANNELS ? load_norm(job.norm, k) : 1.f;
      }
#pragma unroll
      for (int i = 2 * n; i < 2 * n + 2; i++)
        x[i] = pair_of(__fdiv_rn(number(x[i], 0), norm[0]), __fdiv_rn(number(x[i], 1), norm[1]));
    }
  }
#endif

  // Bounds of the groups that this lane sees, of this warp's tokens.
  static __device__ __forceinline__ void bound(Bounds* b, const Pair (*x)[4]) {
    // Along rows the halves of a pair are two groups, along k they are one.
    Pair low[2], high[2];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int n = ALONG_K ? i % 2 : i / 2;
        const bool first = f == 0 && (ALONG_K ? i < 2 : i % 2 == 0);
        low[n] = first ? x[f][i] : least(low[n], x[f][i]);
        high[n] = first ? x[f][i] : greatest(high[n], x[f][i]);
      }
    if constexpr (ALONG_K) {
      const Pair lows = over_rows<false>(low), highs = over_rows<true>(high);
#pragma unroll
      for (int n = 0; n < 2; n++) b[n] = {number(lows, n), number(highs, n), 0.f};
      if (MAPPING != ASYMMETRIC) bound_magnitudes(b, x);
    } else {
#pragma unroll
      for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
          low[n] = least(low[n], from_lane(low[n], mask));
          high[n] = greatest(high[n], from_lane(high[n], mask));
        }
#pragma unroll
        for (int half = 0; half < 2; half++)
          b[2 * n + half] = {number(low[n], half), number(high[n], half), 0.f};
      }
    }
  }
  // Rows g and g + 8 in the halves of a pair: what the four lanes that hold them have.
  template <bool TOP>
  static __device__ __forceinline__ Pair over_rows(const Pair* x) {
    Pair y = best<TOP>(halves_of(x[0], x[1], 0), halves_of(x[0], x[1], 1));
#pragma unroll
    for (int mask = 1; mask < 4; mask *= 2) y = best<TOP>(y, from_lane(y, mask));
    return y;
  }
  template <bool TOP>
  static __device__ __forceinline__ Pair best(Pair a, Pair b) {
    return TOP ? greatest(a, b) : least(a, b);
  }
  // The least magnitude, where it matters: if all magnitudes are the same, so are the bounds'. 0
  // otherwise, which the largest one is above.
  static __device__ __forceinline__ void bound_magnitudes(Bounds* b, const Pair (*x)[4]) {
    const bool alike = fabsf(b[0].low) == fabsf(b[0].high) || fabsf(b[1].low) == fabsf(b[1].high);
    if (!__ballot_sync(FULL, alike)) return;
    Pair small[2];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const Pair size = magnitude(x[f][i]);
        small[i % 2] = f == 0 && i < 2 ? size : least(small[i % 2], size);
      }
    const Pair smallest = over_rows<false>(small);
#pragma unroll
    for (int n = 0; n < 2; n++) b[n].smallest = number(smallest, n);
  }

  // Passes the bounds of a step to partners; `seen` is [warp][low, high][channel].
  static __device__ __forceinline__ void pass(const Bounds* b, const Job& job, int step,
                                              float (*seen)[2][D]) {
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
      const int c = channel(job, step, n);
      seen[job.warp][0][c] = job.there ? b[n].low : INFINITE;
      seen[job.warp][1][c] = job.there ? b[n].high : -INFINITE;
    }
  }
  static __device__ __forceinline__ void receive(Bounds* b, const Job& job, int step,
                                                 const float (*seen)[2][D]) {
    const int first = job.warp / PARTNERS * PARTNERS;
#pragma unroll
    for (int n = 0; n < GROUPS; n++) {
      const int c = channel(job, step, n);
      b[n] = {seen[first][0][c], seen[first][1][c], 0.f};
#pragma unroll
      for (int other = 1; other < PARTNERS; other++) {
        b[n].low = least(b[n].low, seen[first + other][0][c]);
        b[n].high = greatest(b[n].high, seen[first + other][1][c]);
      }
    }
  }

#include "groups/write.cuh"

  // Packs the tile; false: a scale or zero-point does not fit. All warps of a block call it.
  static __device__ __forceinline__ bool run(const Job& job, float (*seen)[2][D]) {
    Pair x[FRAGMENTS][4];
    Bounds b[GROUPS];
    if constexpr (PARTNERS > 1) {
      for (int step = 0; step < STEPS; step++) {
        load(x, job, step);
        bound(b, x);
        pass(b, job, step, seen);
      }
      __syncthreads();
    }
    if (!job.there) return true;
    bool wide = false, fits;
    // Not often twice: steps of a tile are all of one kind.
#pragma unroll 1
    while (true) {
      fits = write_all(x, b, job, seen, wide);
      if (ALONG_K || wide || !of_sharers(!fits)) break;
      wide = true;
    }
    if constexpr (AGREE) __syncthreads();
    if (!(K_SEPARATE || V_SEPARATE) || job.codes)
      words_of(job).template write<MAPPING != ASYMMETRIC, SHARERS>(job.codes, job.lane, job.part);
    return fits;
  }
  // True if a lane of the warps that share the tile has it.
  static __device__ __forceinline__ bool of_sharers(bool has) {
    if constexpr (AGREE)
      return __syncthreads_or(has);
    else
      return __ballot_sync(FULL, has);
  }
  static __device__ __forceinline__ Words<OWN_WORDS> words_of(const Job& job) {
    return Words<OWN_WORDS>(job.words + job.part * OWN_WORDS * 128, job.lane);
  }
  // Scales and zero-points of the tile, and its codes in `words`.
  static __device__ __forceinline__ bool write_all(Pair (*x)[4], Bounds* b, const Job& job,
                                                   const float (*seen)[2][D], bool wide) {
    words_of(job).clear();
    if constexpr (AGREE) __syncthreads();
    RowPair before = {};
    bool fits = true;
#pragma unroll(MAPPING == ASYMMETRIC ? 1 : 2)
    for (int n = 0; n < OWN_STEPS; n++) {
      const int step = job.part * OWN_STEPS + n;
      load(x, job, step);
      if constexpr (PARTNERS > 1)
        receive(b, job, step, seen);
      else
        bound(b, x);
      fits &= write(x, b, job, step, before, wide);
    }
    return fits;
  }
};
