// What a block needs before its first key and after its last one.
struct __align__(16) Prologue {
  Table table;
  int bias[4], ones[4];
  float heads[HEADS][2];  // two numbers of each head, see Table
  u32 value[D];           // V's scale and zero-point of every channel, fp16
  short channel[Values::COLUMNS * 16];

  __device__ __forceinline__ void load_values(const Arguments& at, const Unit& u) {
    const unsigned char* order = at.v_order + (size_t)u.row * CHANNELS;
    for (int rank = u.tid; rank < CHANNELS; rank += WARPS * 32) {
      const u32 scale = rank < Values::CODED ? at.v_scale[(size_t)u.row * Values::CODED + rank] : 0;
      value[order[rank]] = scale | (u32)at.v_zero[(size_t)u.row * CHANNELS + rank] << 16;
    }
    for (int place = u.tid; place < Values::COLUMNS * 16; place += WARPS * 32) {
      const int rank = Values::rank(place);
      channel[place] = rank < 0 ? -1 : order[rank];
    }
    if (u.tid < 4) bias[u.tid] = BIAS_BITS, ones[u.tid] = 0x01010101;
  }
  __device__ __forceinline__ void load_query(const Arguments& at, const Unit& u) {
    table.load(at, u, heads);
  }
};
