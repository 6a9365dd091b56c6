// V's parameters of a thread: its ranks' scales, zero-points and channels, and its slots'
// channels. V_SMALL: the upper half has the bits of a middle, and the largest code.
struct ValueParameters {
  static constexpr int THREADS = WARPS * 32, RANKS = (CHANNELS + THREADS - 1) / THREADS,
                       SLOTS = (Values::COLUMNS * 16 + THREADS - 1) / THREADS;
  u32 scale_zero[RANKS];
#if V_SMALL
  float zero_factor;
#endif
  int channel[RANKS];
  short of_slot[SLOTS];

  __device__ __forceinline__ void load(const Arguments& at, const Unit& u) {
    const unsigned char* order = at.v_order + (size_t)u.row * CHANNELS;
    const ParameterRow<V_SMALL, false> scales(at.v_scale, u.row, Values::CODED);
    const ParameterRow<V_SMALL, true> zeros(at.v_zero, u.row, CHANNELS);
#if V_SMALL
    zero_factor = small_factor(zeros.bytes[0]);
#endif
#pragma unroll
    for (int i = 0; i < RANKS; i++) {
      const int rank = min(u.tid + i * THREADS, CHANNELS - 1);
      const bool coded = rank < Values::CODED;
      if constexpr (V_SMALL)
        scale_zero[i] = pack2(coded ? scales.number(rank) : 0.f, 0.f) |  // exact
                        (u32)zeros.bytes[1 + rank] << 16 | (u32)Values::top(rank) << 24;
      else
        scale_zero[i] = (coded ? scales.half(rank) : 0) | (u32)zeros.half(rank) << 16;
      channel[i] = order[rank];
    }
#pragma unroll
    for (int i = 0; i < SLOTS; i++) {
      const int rank = Values::rank(min(u.tid + i * THREADS, Values::COLUMNS * 16 - 1));
      of_slot[i] = rank < 0 ? -1 : order[rank];
    }
  }
};

// Parameters that a block needs before its first key and after its last one.
struct __align__(16) Prologue {
  Table table;
  int bias[4], ones[4];
  float heads[HEADS][2];  // two numbers of each head, see Table
  u32 value[D];           // V's scale and zero-point of every channel, see ValueParameters
#if V_SMALL
  // Factor of the middles.
  float value_factor;
#endif
  short channel[Values::COLUMNS * 16];

  __device__ __forceinline__ void put_values(const Unit& u, const ValueParameters& of) {
#pragma unroll
    for (int i = 0; i < ValueParameters::RANKS; i++)
      if (u.tid + i * ValueParameters::THREADS < CHANNELS) value[of.channel[i]] = of.scale_zero[i];
#pragma unroll
    for (int i = 0; i < ValueParameters::SLOTS; i++) {
      const int slot = u.tid + i * ValueParameters::THREADS;
      if (slot < Values::COLUMNS * 16) channel[slot] = of.of_slot[i];
    }
    if (u.tid < 4) bias[u.tid] = BIAS_BITS, ones[u.tid] = 0x01010101;
#if V_SMALL
    if (u.tid == 0) value_factor = of.zero_factor;
#endif
  }
  // V's scale and lowest level of a channel.
  __device__ __forceinline__ void value_numbers(float* scale_zero, int c) const {
#if V_SMALL
    const u32 all = value[c];
    unpack2(scale_zero, (all & 0xFFFF) | (u32)small_half<true>(all >> 16 & 0xFF) << 16);
    scale_zero[1] = fmaf(scale_zero[0], -0.5f * (float)(all >> 24), scale_zero[1] * value_factor);
#else
    unpack2(scale_zero, value[c]);
#endif
  }
  // loaded: of the warp's first head.
  __device__ __forceinline__ void fold_query(const Call& at, const Unit& u,
                                             const KeyParameters& keys, QueryFours loaded) {
    for (int h = u.warp; h < HEADS; h += WARPS) {
      if (h != u.warp) loaded.load(at, u, h);
      table.fold(u, keys, loaded, h, heads);
    }
  }
};
