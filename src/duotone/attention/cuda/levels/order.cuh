// Bits of each channel: the largest power first, ties by channel number. Then the order of channels
// by class, which within a class is theirs (quant.classes).

// Class of a channel's rank, and the first rank of a class.
__device__ __forceinline__ int class_of(int rank) {
  return rank < N4 ? 0 : rank < N4 + N2 ? 1 : rank < CODED ? 2 : 3;
}
__device__ __forceinline__ int class_start(int number) {
  return number == 0 ? 0 : number == 1 ? N4 : number == 2 ? N4 + N2 : CODED;
}
__device__ __forceinline__ int bits_of_slot(int slot) {
  const int number = class_of(slot);
  return number == 3 ? 0 : 4 >> number;
}

struct ChannelOrder {
  float power[CHANNELS];
  unsigned char number[CHANNELS], channel[CHANNELS], slot[CHANNELS];

  // All threads come here, and may read the order afterwards.
  __device__ __forceinline__ void find(const Arguments& at, const Block& block) {
    for (int c = threadIdx.x; c < CHANNELS; c += THREADS)
      power[c] = RANKED ? total(at, block, c) : 0;
    __syncthreads();
    for (int c = threadIdx.x; c < CHANNELS; c += THREADS) number[c] = class_of(rank(c));
    __syncthreads();
    for (int c = threadIdx.x; c < CHANNELS; c += THREADS) {
      int at_slot = class_start(number[c]);
      for (int other = 0; other < c; other++) at_slot += number[other] == number[c];
      slot[c] = at_slot, channel[at_slot] = c;
    }
    __syncthreads();
  }
  // Infinite for what is not a number, so that slots are distinct whatever comes in.
  static __device__ __forceinline__ float total(const Arguments& at, const Block& block, int c) {
    const float* from = at.power + (long long)block.row * at.splits * CHANNELS + c;
    float sum = 0.f;
    for (int s = 0; s < at.splits; s++) sum += from[(long long)s * CHANNELS];
    return sum >= 0.f ? sum : INFINITE;
  }
  __device__ __forceinline__ int rank(int c) const {
    if (!RANKED) return c;
    int before = 0;
    for (int other = 0; other < CHANNELS; other++)
      before += power[other] > power[c] || (power[other] == power[c] && other < c);
    return before;
  }
};
