// N words of codes per lane, in shared memory while a warp fills them: [word][lane].
template <int N>
struct Words {
  u32 memory;  // N * 128 bytes, then this lane's
  __device__ __forceinline__ Words(u32 first, int lane) : memory(first + lane * 4) {}

  __device__ __forceinline__ void clear() const {
#pragma unroll 8
    for (int w = 0; w < N; w++) store_shared(memory + w * 128, 0);
  }
  __device__ __forceinline__ void add(int word, u32 bits) const {
    store_shared(memory + word * 128, load_shared(memory + word * 128) | bits);
  }
  // Into a layout's order, [vectors][32 lanes][unit words], where these are part `part` of PARTS of
  // a lane's words. ROTATED: rotated left by 1 bit.
  template <bool ROTATED = false, int PARTS = 1>
  __device__ __forceinline__ void write(char* target, int lane, int part = 0) const {
    constexpr int ALL = N * PARTS, UNIT = ALL % 4 == 0 ? 4 : ALL % 2 ? 1 : 2;
    constexpr int TOGETHER = N % UNIT ? 1 : UNIT;
#pragma unroll 8
    for (int v = 0; v < N / TOGETHER; v++) {
      u32 x[TOGETHER];
#pragma unroll
      for (int j = 0; j < TOGETHER; j++) {
        x[j] = load_shared(memory + (v * TOGETHER + j) * 128);
        if (ROTATED) x[j] = x[j] << 1 | x[j] >> 31;
      }
      const int word = part * N + v * TOGETHER;
      char* at = target + ((word / UNIT * 32 + lane) * UNIT + word % UNIT) * 4;
      if constexpr (TOGETHER == 4)
        *(uint4*)at = make_uint4(x[0], x[1], x[2], x[3]);
      else if constexpr (TOGETHER == 2)
        *(uint2*)at = make_uint2(x[0], x[1]);
      else
        *(u32*)at = x[0];
    }
  }
};
