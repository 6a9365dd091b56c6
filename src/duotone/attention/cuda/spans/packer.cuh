// A warp, or two that share the registers, packs K or V of 32 tokens, half of a tile of layout.py,
// in steps (spans/steps.cuh).
template <int VALUE, int BITS>
struct SpanPacker {
  static constexpr int STEPS = D / 16, WORDS = D * BITS / 32, OWN_WORDS = WORDS / SHARERS;
  static_assert(WORDS % SHARERS == 0, "words are not shared");
  static constexpr int STEP = 8 / (8 / BITS);  // bits from one code of a byte to the next
  // Steps whose codes lie in the same words: a power of two.
  static constexpr int RUN = STEPS % (8 / BITS) == 0 ? 8 / BITS
                             : STEPS % 4 == 0        ? 4
                             : STEPS % 2 == 0        ? 2
                                                     : 1;

  // 32 tokens to their part of a tile's codes: `half` of it, of which `left` tokens are real.
  static __device__ __forceinline__ void pack(Job job, int half, int left, char* codes) {
    // Lanes 0 to 15 read 8 bytes each at a time: of even rows, which lie in different banks.
    if (!VALUE) job.set_lane((job.lane << 1 & 24) | (job.lane >> 4) << 2 | (job.lane & 3));
    const int part = job.first / OWN;
    const Words<OWN_WORDS> words(job.words + part * OWN_WORDS * 128, job.lane);
    words.clear();
    if (left > 0) add_codes(words, job, left);
    words.template write<false, 2 * SHARERS>(codes, job.lane, half * SHARERS + part);
  }

  static __device__ __forceinline__ void add_codes(const Words<OWN_WORDS>& words, const Job& job,
                                                   int left) {
    u32 real[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) real[i] = real_bytes<VALUE>(job.first + i, left, job.g, job.t);
#pragma unroll 1
    for (int first = 0; first < STEPS; first += RUN) {
      u32 run[OWN] = {};
#pragma unroll 2
      for (int step = first + RUN - 1; step >= first; step--) {
        u32 registers[OWN];
        Steps<VALUE, BITS>::codes(registers, job, step);
#pragma unroll
        for (int i = 0; i < OWN; i++) run[i] = (run[i] << STEP) + registers[i];
      }
#pragma unroll
      for (int i = 0; i < OWN; i++) add_run(words, (i * STEPS + first) * STEP, run[i] & real[i]);
    }
  }
  // Codes of a run, the first of which stands at `bit` of a lane's bytes.
  static __device__ __forceinline__ void add_run(const Words<OWN_WORDS>& words, int bit, u32 run) {
    const int n = bit / 8, planes = n / 4 * 3;
    if constexpr (BITS == 3) {
      words.add(planes + n % 4 / 2, (run & 0x33333333) << n % 2 * 2);
      words.add(planes + 2, (run >> 2 & 0x11111111) << n % 4);
    } else
      words.add(n, run << bit % 8);
  }
};
