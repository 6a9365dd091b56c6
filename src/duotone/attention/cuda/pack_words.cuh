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
  // Into a layout's order: [vectors][32 lanes][unit words]. TURNED: rotated left by 1 bit.
  template <bool TURNED = false>
  __device__ __forceinline__ void write(char* target, int lane) const {
    constexpr int UNIT = N % 4 == 0 ? 4 : N % 2 ? 1 : 2;
#pragma unroll 8
    for (int v = 0; v < N / UNIT; v++) {
      u32 x[UNIT];
#pragma unroll
      for (int j = 0; j < UNIT; j++) {
        x[j] = load_shared(memory + (v * UNIT + j) * 128);
        if (TURNED) x[j] = x[j] << 1 | x[j] >> 31;
      }
      char* at = target + (v * 32 + lane) * UNIT * 4;
      if constexpr (UNIT == 4)
        *(uint4*)at = make_uint4(x[0], x[1], x[2], x[3]);
      else if constexpr (UNIT == 2)
        *(uint2*)at = make_uint2(x[0], x[1]);
      else
        *(u32*)at = x[0];
    }
  }
};
