// What a block reads before its first key: scales and zero-points of a span, and q.

// What a block needs before its first key and after its last one.
struct __align__(16) Prologue {
  u32 digits[HEADS][2][D / 4];  // [head][high, low][t][register]: channels 16 r + 4 t to + 3
  float v_scale[D], v_zero[D];
  int bias[4];
  float heads[HEADS][2];
#ifdef KEPT_SCORES
  float sums[HEADS][2];  // of the negative and of the positive channels, in units of the largest
#endif
};

// Fours of channels of a lane, and V's of a thread.
#define FOURS ((D / 4 + 31) / 32)
#define V_FOURS ((CHANNELS / 4 + WARPS * 32 - 1) / (WARPS * 32))

__device__ __forceinline__ float4 floats_of(uint2 halves) {
  return make_float4(half_to_float((u16)halves.x), half_to_float((u16)(halves.x >> 16)),
                     half_to_float((u16)halves.y), half_to_float((u16)(halves.y >> 16)));
}

// Scales and zero-points of a span, in the registers of who needs them. They are asked for ahead of
// the first records: behind those an answer takes microseconds, while memory serves all blocks'.
struct Params {
  uint2 k_scale[FOURS], k_zero[FOURS], v_scale[V_FOURS], v_zero[V_FOURS];

  __device__ __forceinline__ void load(const Arguments& at, const Unit& u) {
    const size_t row = (size_t)u.row * CHANNELS;
    if (u.warp < HEADS) {
#pragma unroll
      for (int i = 0; i < FOURS; i++) {
        const size_t c = row + min(of_lane(u, i), CHANNELS - 4);
        k_scale[i] = *(const uint2*)(at.k_scale + c), k_zero[i] = *(const uint2*)(at.k_zero + c);
      }
    }
#pragma unroll
    for (int i = 0; i < V_FOURS; i++) {
      if (of_thread(u, i) >= CHANNELS) continue;
      const size_t c = row + of_thread(u, i);
      v_scale[i] = *(const uint2*)(at.v_scale + c), v_zero[i] = *(const uint2*)(at.v_zero + c);
    }
  }
  __device__ __forceinline__ void store_value(const Unit& u, Prologue& p) const {
#pragma unroll
    for (int i = 0; i < V_FOURS; i++) {
      const int c = of_thread(u, i);
      if (c >= CHANNELS) continue;
      *(float4*)(p.v_scale + c) = floats_of(v_scale[i]);
      *(float4*)(p.v_zero + c) = floats_of(v_zero[i]);
    }
  }
  static __device__ __forceinline__ int of_lane(const Unit& u, int i) {
    return (i * 32 + u.lane) * 4;
  }
  // V's go to the last threads: the first warps have q.
  static __device__ __forceinline__ int of_thread(const Unit& u, int i) {
    return ((i + 1) * WARPS * 32 - 1 - u.tid) * 4;
  }
};

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
  // Of the warp's first head.
  __device__ __forceinline__ void await(const Call& at, const Unit& u) {
    wait_for_query();
    load(at, u, u.warp);
  }
  __device__ __forceinline__ void load(const Call& at, const Unit& u, int h) {
#pragma unroll
    for (int i = 0; i < FOURS; i++) four[i] = {};
    if (h >= G) return;
    const query_t* query = at.query + ((size_t)u.head * G + h) * CHANNELS;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
      const int c = Params::of_lane(u, i);
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
