// One warp packs K or V of 64 tokens into a tile of classes/layout.py, 32 tokens at a time.
//
// A step is a column of 16 slots of 32 tokens: the elements of its channels, wherever they stand
// in a row. With g = lane / 4, t = lane % 4, register i of a lane has byte j for code
//   K: token 8 i + g, slot 16 column + 4 t + j
//   V: token 8 (i / 2) + 2 t + 16 (j % 2) + j / 2, slot 16 column + 8 (i % 2) + g
// Of a half column K keeps codes of slots 0 to 7 for the first 32 tokens, of slots 8 to 15 for the
// others; V those of even i.

// Work of a packing warp, and room for its elements, words and levels.
struct Job {
  u32 tile, words, levels;
  int lane, g, t;
  const char* head;
  int stride;
  const int* token;  // of each slot of the tile; -1: none, after all others
};

// A block's levels, [scale, zero-point, inverse, channel's bytes into a row][slot]; where a column
// is filled up, a scale of 0.
template <int VALUE, class C>
__device__ __forceinline__ void load_levels(const Job& job, const Side& from, long long row) {
  const unsigned char* order = from.order + row * CHANNELS;
  for (int slot = job.lane; slot < 16 * C::COLUMNS; slot += 32) {
    const int rank = C::rank(VALUE ? slot : C::once(slot));
    Levels l = {};
    u32 offset = 0;
    if (rank >= 0) {
      l.read(__ldg(from.scale + row * C::CODED + rank), __ldg(from.zero + row * C::CODED + rank));
      offset = __ldg(order + rank) * ELEMENT_BYTES;
    }
    const u32 at = job.levels + 4 * slot;
    store_shared(at, __float_as_uint(l.scale));
    store_shared(at + 4 * CODE_SLOTS, __float_as_uint(l.zero));
    store_shared(at + 8 * CODE_SLOTS, __float_as_uint(l.inverse));
    store_shared(at + 12 * CODE_SLOTS, offset);
  }
}

__device__ __forceinline__ float load_element(u32 at) {
#if INPUT == 2
  return __uint_as_float(load_shared(at));
#else
  const Pair x = {load_shared_half(at)};
  return number(x, 0);
#endif
}

template <int VALUE, class C>
struct ClassPacker {
  static constexpr int LEVELS = VALUE ? 2 : 4;  // slots of a lane in a step

  static __device__ __forceinline__ void run(const Job& job, char* codes) {
    const Words<C::WORDS> words(job.words, job.lane);
    words.clear();
    for (int half = 0; half < 2; half++) {
      const int position = job.token[TILE * half + job.lane];
      const int left = __popc(__ballot_sync(FULL, position >= 0));
      if (left == 0) break;
      __syncwarp();  // all lanes are done with what was there
      load_tile(job.tile, job.head, job.stride, position, job.lane);
      u32 real[4];
#pragma unroll
      for (int i = 0; i < 4; i++) real[i] = real_bytes<VALUE>(i, left, job.g, job.t);
      pack_class<4>(words, job, half, real);
      pack_class<2>(words, job, half, real);
      pack_class<1>(words, job, half, real);
    }
    words.write(codes, job.lane);
  }

  template <int BITS>
  static __device__ __forceinline__ void pack_class(const Words<C::WORDS>& words, const Job& job,
                                                    int half, const u32* real) {
    constexpr int COLUMNS = C::columns(BITS), WHOLE = C::whole(BITS);
#pragma unroll 1
    for (int column = 0; column < COLUMNS; column++) {
      const bool is_half = column == WHOLE;
      const u32 own = VALUE || !is_half || job.t / 2 == half ? FULL : 0;
      float x[4][4];
      Levels l[LEVELS];
      u32 offset[LEVELS];
      load_column(l, offset, job, C::first_column(BITS) + column);
      load(x, offset, job);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        if (VALUE && is_half && i % 2) continue;
        u32 four = 0;
#pragma unroll
        for (int j = 0; j < 4; j++)
          four += l[VALUE ? i % 2 : j].template code<BITS>(x[i][j]) << 8 * j;
        const int of_half = VALUE ? 2 * half + i / 2 : i;
        const int e = is_half ? 8 * WHOLE + of_half : (4 * half + i) * WHOLE + column;
        const int bit = e * BITS;
        words.add(C::first_word(BITS) + bit / 8, (four & real[i] & own) << bit % 8);
      }
    }
  }
  // x[i][j]: the elements of a step.
  static __device__ __forceinline__ void load(float (*x)[4], const u32* offset, const Job& job) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int token = VALUE ? 8 * (i / 2) + 2 * job.t + 16 * (j % 2) + j / 2 : 8 * i + job.g;
        x[i][j] = load_element(job.tile + token * ROW_BYTES + offset[VALUE ? i % 2 : j]);
      }
  }
  static __device__ __forceinline__ void load_column(Levels* l, u32* offset, const Job& job,
                                                     int column) {
#pragma unroll
    for (int n = 0; n < LEVELS; n++) {
      const u32 at = job.levels + 4 * (16 * column + (VALUE ? 8 * n + job.g : 4 * job.t + n));
      l[n].scale = __uint_as_float(load_shared(at));
      l[n].zero = __uint_as_float(load_shared(at + 4 * CODE_SLOTS));
      l[n].inverse = __uint_as_float(load_shared(at + 8 * CODE_SLOTS));
      offset[n] = load_shared(at + 12 * CODE_SLOTS);
    }
  }
};
