// 1 and 2 bits of 16-bit elements by comparisons in their own type, two elements at a time.
//
// A Coder's code never falls as an element rises, so that the least element of code j or more
// decides. It is found once per channel; a step then takes a third of the instructions, or less.

// 16-bit numbers in their order: 0 is +0, -1 is -0, and on both sides of the infinite ones is what
// compares with nothing.
#define MOST_ORDER (INPUT == 0 ? 0x7C00 : 0x7F80)
__device__ __forceinline__ u32 in_order(int k) {
  return k < 0 ? 0x8000 | ~k : k;
}
__device__ __forceinline__ int order_of(float x) {
  const u32 bits = pair_of(x, x).x & 0xFFFF;
  const int k = bits & 0x8000 ? ~(int)(bits & 0x7FFF) : bits;
  return min(max(k, -1 - MOST_ORDER), MOST_ORDER);
}

// The least element of code j or more, as bits; not a number where there is none.
template <int BITS>
__device__ __forceinline__ u32 threshold(const Coder<BITS>& coder, const Levels& l, int j) {
  const auto reaches = [&](int k) {
    return coder.code(__fsub_rn(number({in_order(k)}, 0), l.zero)) >= j;
  };
  const int near = order_of(fmaf(l.scale, j - 0.5f, l.zero));
  int below = near - 1, there = near + 1;
  if (reaches(below)) below = -2 - MOST_ORDER;
  if (!reaches(there)) there = MOST_ORDER + 1;
  while (there - below > 1) {
    const int middle = (below + there) >> 1;
    (reaches(middle) ? there : below) = middle;
  }
  return in_order(there);
}

// Thresholds in shared memory: K's [j - 1][channel], V's twice each for the halves of a pair.
template <int VALUE, int BITS>
struct ComparedSteps {
  static constexpr int EDGES = (1 << BITS) - 1, LEVEL_PARTS = EDGES;

  static __device__ __forceinline__ void store_levels(u32 levels, const Levels& l, int channel,
                                                      int edge) {
    Coder<BITS> coder;
    coder.set(l);
    const u32 least = threshold(coder, l, edge + 1), at = edge * D + channel;
    if constexpr (VALUE)
      store_shared(levels + at * 4, least * 0x10001);
    else
      store_shared_half(levels + at * 2, least);
  }
  static __device__ __forceinline__ void codes(u32* registers, const Job& job, int step) {
    u32 edges[EDGES][2];  // K: of both pairs of channels; V: of both channels
    load_edges(edges, job, step);
    if constexpr (VALUE) {
      Pair chunks[2][OWN];
      load_chunks(chunks, job, step);
#pragma unroll
      for (int i = 0; i < OWN; i++)
        registers[i] = four_codes(chunks[0][i], chunks[1][i], edges, i % 2, i % 2);
    } else {
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        u32 y[2];
        load_shared(
            y, job.tile + (8 * (job.first + i) + job.g) * ROW_BYTES + (16 * step + 4 * job.t) * 2);
        registers[i] = four_codes({y[0]}, {y[1]}, edges, 0, 1);
      }
    }
  }
  static __device__ __forceinline__ void load_edges(u32 (*edges)[2], const Job& job, int step) {
#pragma unroll
    for (int n = 0; n < EDGES; n++)
      if constexpr (VALUE)
        edges[n][0] = load_shared(job.levels + (n * D + 16 * step + job.g) * 4),
        edges[n][1] = load_shared(job.levels + (n * D + 16 * step + 8 + job.g) * 4);
      else
        load_shared(edges[n], job.levels + (n * D + 16 * step + 4 * job.t) * 2);
  }
  // Codes as bytes, of two pairs whose edges are columns of `edges`. A comparison gives all ones or
  // nothing in a half. With 2 bits the second edge decides on the upper bit, all edges decide on
  // the lower one.
  static __device__ __forceinline__ u32 four_codes(Pair a, Pair b, const u32 (*edges)[2], int of_a,
                                                   int of_b) {
    constexpr u32 BYTES = VALUE ? 0x6240 : 0x6420;
    u32 low[2] = {}, reached[EDGES][2];
#pragma unroll
    for (int n = 0; n < EDGES; n++) {
      reached[n][0] = at_least(a, {edges[n][of_a]}), reached[n][1] = at_least(b, {edges[n][of_b]});
      low[0] ^= reached[n][0], low[1] ^= reached[n][1];
    }
    const u32 codes = __byte_perm(low[0], low[1], BYTES) & 0x01010101;
    if constexpr (BITS == 1)
      return codes;
    else
      return codes | (__byte_perm(reached[1][0], reached[1][1], BYTES) & 0x02020202);
  }
};
