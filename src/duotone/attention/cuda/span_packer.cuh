// One warp packs K or V of 64 tokens into a tile of layout.py, 32 tokens at a time.
//
// A step is 16 channels of 32 tokens. With g = lane / 4, t = lane % 4, register i of a lane has
// byte j for code
//   K: token 8 i + g, channel 16 step + 4 t + j
//   V: token 8 (i / 2) + 2 t + 16 (j % 2) + j / 2, channel 16 step + 8 (i % 2) + g

// What a packing warp has: room for its elements, words and levels, and what it packs.
struct Job {
  u32 tile, words, levels;
  int lane, g, t;
  const char* head;
  int stride;
  const long long* index;  // of the tile's first token
  int left;                // tokens from there to the end of the block
};

// [scale, zero-point, inverse][channel] of a block of tokens, from its rows of parameters.
__device__ __forceinline__ void load_levels(const Job& job, const u16* scale, const u16* zero) {
  for (int c = job.lane; c < D; c += 32) {
    Levels l = {};
    if (c < CHANNELS) l.read(__ldg(scale + c), __ldg(zero + c));
    store_shared(job.levels + c * 4, __float_as_uint(l.scale));
    store_shared(job.levels + (D + c) * 4, __float_as_uint(l.zero));
    store_shared(job.levels + (2 * D + c) * 4, __float_as_uint(l.inverse));
  }
}

template <int VALUE, int BITS>
struct SpanPacker {
  static constexpr int STEPS = D / 16, WORDS = D * BITS / 16;
  static constexpr int LEVELS = VALUE ? 2 : 4;  // channels of a lane in a step

  static __device__ __forceinline__ void run(const Job& job, char* codes) {
    const Words<WORDS> words(job.words, job.lane);
    words.clear();
    for (int half = 0; half < 2; half++) {
      const int left = job.left - TILE * half;
      if (left <= 0) break;
      const int position = job.lane < left ? (int)job.index[TILE * half + job.lane] : -1;
      __syncwarp();  // all lanes are done with what was there
      load_tile(job.tile, job.head, job.stride, position, job.lane);
      pack_half(words, job, half, left);
    }
    words.write(codes, job.lane);
  }

  static __device__ __forceinline__ void pack_half(const Words<WORDS>& words, const Job& job,
                                                   int half, int left) {
    u32 real[4];
#pragma unroll
    for (int i = 0; i < 4; i++) real[i] = real_bytes<VALUE>(i, left, job.g, job.t);
#pragma unroll 1
    for (int step = 0; step < STEPS; step++) {
      float x[4][4];
      load(x, job, step);
      Levels l[LEVELS];
      load_step(l, job, step);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 four = 0;
#pragma unroll
        for (int j = 0; j < 4; j++)
          four += l[VALUE ? i % 2 : j].template code<BITS>(x[i][j]) << 8 * j;
        const int bit = ((4 * half + i) * STEPS + step) * BITS;
        words.add(bit / 8, (four & real[i]) << bit % 8);
      }
    }
  }
  // x[i][j]: the elements of a step.
  static __device__ __forceinline__ void load(float (*x)[4], const Job& job, int step) {
    if constexpr (VALUE) {
#pragma unroll
      for (int chunk = 0; chunk < 2; chunk++) {
        Pair y[4];
        load_fragment<true>(y, job.tile, step, chunk, job.lane);
#pragma unroll
        for (int i = 0; i < 4; i++)
          x[i][chunk] = number(y[i], 0), x[i][2 + chunk] = number(y[i], 1);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 4; i++)
        load_row(x[i], job.tile + (8 * i + job.g) * ROW_BYTES,
                 (16 * step + 4 * job.t) * ELEMENT_BYTES);
    }
  }
  // Four consecutive elements of a token.
  static __device__ __forceinline__ void load_row(float* x, u32 row, int at) {
#if INPUT == 2
    load_shared(x, row + at);
#else
    const Pair low = {load_shared(row + at)}, high = {load_shared(row + at + 4)};
    x[0] = number(low, 0), x[1] = number(low, 1), x[2] = number(high, 0), x[3] = number(high, 1);
#endif
  }
  static __device__ __forceinline__ void load_step(Levels* l, const Job& job, int step) {
    if constexpr (VALUE) {
#pragma unroll
      for (int n = 0; n < 2; n++) {
        const u32 at = job.levels + (16 * step + 8 * n + job.g) * 4;
        l[n].scale = __uint_as_float(load_shared(at));
        l[n].zero = __uint_as_float(load_shared(at + D * 4));
        l[n].inverse = __uint_as_float(load_shared(at + D * 8));
      }
    } else {
      const u32 at = job.levels + (16 * step + 4 * job.t) * 4;
      float y[3][4];
      load_shared(y[0], at), load_shared(y[1], at + D * 4), load_shared(y[2], at + D * 8);
#pragma unroll
      for (int n = 0; n < 4; n++) l[n].scale = y[0][n], l[n].zero = y[1][n], l[n].inverse = y[2][n];
    }
  }
};
