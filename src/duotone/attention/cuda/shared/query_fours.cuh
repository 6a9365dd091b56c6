// Channels in fours: a lane's vectors of q, and of what is known by channel.
#define FOURS ((D / 4 + 31) / 32)  // of a lane

// The first channel of a lane's vector i.
__device__ __forceinline__ int channels_of(const Unit& u, int i) {
  return (i * 32 + u.lane) * 4;
}
__device__ __forceinline__ float4 floats_of(uint2 halves) {
  return make_float4(half_to_float((u16)halves.x), half_to_float((u16)(halves.x >> 16)),
                     half_to_float((u16)halves.y), half_to_float((u16)(halves.y >> 16)));
}

// A lane's fours of channels of a q head; 0 where there is none.
struct QueryFours {
#if QUERY == 2
  typedef float4 Four;
#else
  typedef uint2 Four;
#endif
  Four four[FOURS];

  // The head may be written until somebody waits for it, into L2, where it is read from.
  static __device__ __forceinline__ void hint(const Call& at, const Unit& u) {
    constexpr int LINE = 128, BYTES = G * CHANNELS * sizeof(query_t);
    const char* heads = (const char*)at.query + (size_t)u.head * BYTES;
    if (u.tid * LINE < BYTES) asm volatile("prefetch.global.L2 [%0];" ::"l"(heads + u.tid * LINE));
  }
  // Waits for q and loads the warp's first head.
  __device__ __forceinline__ void await(const Call& at, const Unit& u) {
    wait_for_query();
    load(at, u, u.warp);
  }
  // Waits for q and loads BYTES of the first packed tiles; Q_FIRST: in this order.
  template <bool Q_FIRST, int BYTES>
  __device__ __forceinline__ void await_and_start(const Call& at, Unit& u, Ring& ring,
                                                  const UnitTokens& tokens) {
    if (Q_FIRST)
      await(at, u);
    else
      hint(at, u);
    ring.start_early<BYTES, 0>(at, u, tokens);
    ring.reset(u);
    if (!Q_FIRST) await(at, u);
  }
  __device__ __forceinline__ void load(const Call& at, const Unit& u, int h) {
#pragma unroll
    for (int i = 0; i < FOURS; i++) four[i] = {};
    if (h >= G) return;
    const query_t* query = at.query + ((size_t)u.head * G + h) * CHANNELS;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
      const int c = channels_of(u, i);
      if (c < CHANNELS) four[i] = *(const Four*)(query + c);
    }
  }
  __device__ __forceinline__ float4 floats(int i) const {
#if QUERY == 2
    return four[i];
#else
    const uint2 x = four[i];
    return make_float4(query_to_float((u16)x.x), query_to_float((u16)(x.x >> 16)),
                       query_to_float((u16)x.y), query_to_float((u16)(x.y >> 16)));
#endif
  }
};
