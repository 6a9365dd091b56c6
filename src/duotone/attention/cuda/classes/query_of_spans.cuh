// q where K's parameters belong to whole spans: in K's coded slots, as integers, once per block.

// A lane's parameters of K: channel and scale of its slots in pairs of columns, channel and
// zero-point of its ranks. Scales are 0 where columns are filled up, as is all after the last
// column.
struct KeyParameters {
  static constexpr int PAIRS = (Keys::COLUMNS + 1) / 2, RANKS = D / 32;
  int channel[PAIRS], ranked[RANKS];
  float scale[PAIRS], zero[RANKS];

  __device__ __forceinline__ void load(const Arguments& at, const Unit& u) {
    const unsigned char* order = at.k_order + (size_t)u.row * CHANNELS;
    const ParameterRow<K_SMALL, false> scales(at.k_scale, u.row, Keys::CODED);
    const ParameterRow<K_SMALL, true> zeros(at.k_zero, u.row, CHANNELS);
#pragma unroll
    for (int i = 0; i < PAIRS; i++) {
      const int slot = 32 * i + u.lane;
      const int rank = slot < 16 * Keys::COLUMNS ? Keys::rank(Keys::once(slot)) : -1;
      channel[i] = rank < 0 ? 0 : order[rank];
      scale[i] = rank < 0 ? 0.f : scales.number(rank);
    }
#pragma unroll
    for (int i = 0; i < RANKS; i++) {
      const int rank = 32 * i + u.lane;
      const bool real = rank < CHANNELS;
      ranked[i] = real ? order[rank] : 0;
      zero[i] = real ? zeros.number(rank) : 0.f;
      if (K_SMALL && rank < Keys::CODED)
        zero[i] = fmaf(scales.number(rank), -0.5f * Keys::top(rank), zero[i]);
    }
  }
};
#define ROWS (WARPS < HEADS ? WARPS : HEADS)  // q heads that are folded at a time

// A block's q before its first key.
struct __align__(16) Table {
  float rows[ROWS][D];                   // a warp's head by channel, while it is folded
  int query[HEADS][Keys::COLUMNS * 16];  // integers in the low bits, above BIAS_BITS

  // heads: the largest |q| * scale, and q times the zero-points.
  __device__ __forceinline__ void fold(const Unit& u, const KeyParameters& keys,
                                       const QueryFours& loaded, int h, float (*heads)[2]) {
    float* row = rows[u.warp];
    __syncwarp();  // the head before is folded
#pragma unroll
    for (int i = 0; i < FOURS; i++)
      if (channels_of(u, i) < D) *(float4*)(row + channels_of(u, i)) = loaded.floats(i);
    __syncwarp();
    float folded[KeyParameters::PAIRS], top = 0.f, sum = 0.f;
#pragma unroll
    for (int i = 0; i < KeyParameters::PAIRS; i++) {
      folded[i] = row[keys.channel[i]] * keys.scale[i];
      top = fmaxf(top, fabsf(folded[i]));
    }
#pragma unroll
    for (int i = 0; i < KeyParameters::RANKS; i++)
      sum = fmaf(row[keys.ranked[i]], keys.zero[i], sum);
    top = fmaxf(most_of_lanes(top), 1e-20f), sum = sum_of_lanes(sum);
    put(folded, Q_TOP / top, query[h], u.lane);
    if (u.lane == 0) heads[h][0] = top, heads[h][1] = sum;
  }
  // A head's integers. Where a column's codes stand above the lowest bits, q is so much smaller.
  static __device__ __forceinline__ void put(const float* folded, float inverse, int* to,
                                             int lane) {
#pragma unroll
    for (int i = 0; i < KeyParameters::PAIRS; i++) {
      const int slot = 32 * i + lane;
      const int up = lane < 16 ? key_bit(2 * i) : key_bit(2 * i + 1);
      if (slot < 16 * Keys::COLUMNS)
        to[slot] = __float_as_int(fmaf(folded[i], inverse / (float)(1 << up), BIAS));
    }
  }
};

struct Query : Digits {
  float scale[HT], offset[HT];  // score * log2(e) = scale * (integer product) + offset

  __device__ __forceinline__ void make(const Arguments& at, const Unit& u, const Table& of,
                                       const float (*heads)[2], const int* biases) {
    load_bias(biases);
#pragma unroll
    for (int h = 0; h < HT; h++) {
#pragma unroll
      for (int r = 0; r < Keys::COLUMNS; r++)
        digits[h][r] =
            digits_of(*(const int4*)(of.query[h * 4 + (u.g >> 1)] + 16 * r + 4 * u.t), u.g);
      scale[h] = heads[h * 4 + u.t][0] * at.sm_scale / Q_TOP;
      offset[h] = heads[h * 4 + u.t][1] * at.sm_scale;
    }
  }
  // Nothing of it changes from tile to tile.
  __device__ __forceinline__ void fold(u32, const Unit&) {}
};
